"""Small results of the documented schemas, made up from a seed: what reports and the explorer are tested on."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

RANKS = [8, 16, 64, 128]
CONTEXT = 256
PROVENANCE = {
    "command": "attngap diagnose smollm2 -o diagnosis",
    "time": "2026-01-02T03:04:05+00:00",
    "versions": {"attngap": "0.1.0", "torch": "2.13.0"},
    "python": "3.11.2",
    "machine": {"cpu": "A CPU", "cores": 2, "system": "Linux"},
    "commit": "0123456789abcdef",
    "seed": 0,
}
MODEL = {"architecture": "LlamaForCausalLM", "fingerprint": "0123456789abcdef"}


# As long as a diagnosis writes them.
REASONS = {
    "keep": "kept for recall: replacing it costs 0.11 nats there, 21.3% of all heads' (on text 0.001, 2.9%); a "
    "retrieval head: puts 87% on the token to copy when text repeats; no weights of rank 64 come nearer than 0.0% on "
    "text, 22.6% on recall; with the best of them 1% of its damage on text and 100% of its damage on recall would "
    "remain",
    "replace": "75% on the first tokens, 13% nearby, 12% far; costs 0.0008 nats on text, 0.001 on recall",
    "window": "reads the token before (86%); a window is enough, at most 0.2% lies beyond it",
}


def head(layer: int, place: int, kv_heads: int, heads: int, dice: random.Random) -> dict[str, Any]:
    damage = math.exp(dice.gauss(-8, 2))
    unavoidable = damage * dice.random() ** 2
    floors = sorted((dice.random() ** 3 for _ in RANKS), reverse=True)
    sink, near = dice.random() * 0.7, dice.random() * 0.2
    kappa = dice.gauss(0.7, 0.3)
    return {
        "id": f"{layer}.{place}",
        "layer": layer,
        "head": place,
        "kv_head": place * kv_heads // heads,
        "verdict": (verdict := dice.choice(["keep", "replace", "replace", "window"])),
        "reason": REASONS[verdict],
        "entropy": dice.random(),
        "top": dice.random(),
        "sink": sink,
        "near": near,
        "far": 1 - sink - near,
        "kappa": kappa,
        "kappa_p10": kappa - 0.2,
        "kappa_p90": kappa + 0.2,
        "selecting": dice.random(),
        "on_sink": dice.random(),
        "n_star": 1 + (CONTEXT - 1) ** kappa,
        "spread": dice.gauss(8, 2),
        "logit_ratio": dice.gauss(5, 1),
        "previous": dice.random() ** 4,
        "duplicate": dice.random() ** 4,
        "induction": dice.random() ** 4,
        "stress_far": dice.random(),
        "floor": floors[2],
        "ceiling": floors[2] * 1.6,
        "floors": floors,
        "ceilings": [1.6 * floor for floor in floors],
        "spectrum": [math.exp(-i / 9) for i in range(64)],
        "fit": dice.random() ** 3,
        "damage": damage,
        "recall_damage": (recall := damage * 3 * dice.random()),
        "recall_unavoidables": [recall * share for share in (1.1, 0.9, 0.46, 0.2)],
        "stress_floors": [1.3 * floor for floor in floors],
        "unavoidable": unavoidable,
        "lost": damage - unavoidable,
        "importance": damage,
        "reads": [
            {"at": 90, "query": " Mary", "key": " <b>John</b>", "after": " went", "distance": 71, "weight": 0.83}
        ],
    }


def diagnosis(folder: Path, layers: int = 4, heads: int = 6, name: str = "tiny", side: int = 64, **changes: Any):
    """Write diagnosis.json and patterns.npz into `folder`; the content."""
    dice = random.Random(0)
    rows = [head(layer, place, heads // 2, heads, dice) for layer in range(layers) for place in range(heads)]
    content = {
        "schema": "attngap.diagnosis/1",
        "model": {"name": name, **MODEL, "layers": layers, "heads": heads, "kv_heads": heads // 2},
        "options": {"context": CONTEXT, "passages": 2, "ranks": RANKS, "window": 64, "sinks": 4, "seed": 0},
        "rank": 64,
        "replacement": {"window": 64, "sinks": 4, "feature_map": "hedgehog"},
        "damage_unit": "nats a token",
        "heads": rows,
        "notes": ["Floors tried 40 of 191 cuts."],
        "provenance": PROVENANCE,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "diagnosis.json").write_text(json.dumps(content))
    noise = np.random.default_rng(0).random((2, layers * heads, side, side)) ** 6
    pictures = (255 * np.tril(noise)).astype(np.uint8)
    np.savez_compressed(folder / "patterns.npz", text=pictures[0], stress=pictures[1])
    return content


def runs(path: Path) -> Path:
    """Write a database with six finished runs of mqar; its path."""
    from attngap.storage.runs import Runs

    with Runs(path) as database:
        specs = [
            {
                "task": "mqar",
                "task_options": {"length": 64},
                "mechanism": mechanism,
                "model": {"head_dim": 16},
                "train": {"steps": 10},
                "learning_rate": 0.001,
                "seed": seed,
                "revision": 1,
            }
            for mechanism in ("softmax", "elu", "gated-delta")
            for seed in (0, 1)
        ]
        database.announce("small", specs)
        for place, spec in enumerate(specs):
            score = {"softmax": 1.0, "elu": 0.3, "gated-delta": 0.8}[spec["mechanism"]] - 0.01 * spec["seed"]
            result = {
                "score": score,
                "validation": score,
                "solved": score > 0.95,
                "seconds": 12.5,
                "metric": "accuracy",
                "higher": True,
                "chance": 0.125,
                "best": 1.0,
                "closed": (score - 0.125) / 0.875,
                "predicted": None if spec["mechanism"] == "softmax" else 0.6,
                "parameters": 20000 + place,
                "state_floats": {"softmax": 4096, "elu": 272, "gated-delta": 256}[spec["mechanism"]],
                "state_rank": 16,
                "tokens": 64,
            }
            database.add(spec, result, PROVENANCE)
    return path


def expected(value: float, half: float) -> dict[str, float]:
    """A predicted figure and its interval."""
    return {"value": value, "low": max(0.0, value - half), "high": value + half}


def plan(path: Path, layers: int = 4, heads: int = 6, kept: int = 3, predicts: bool = True) -> dict[str, Any]:
    """Write a plan that keeps the first heads; the content. Without joint replacements it predicts nothing."""
    total = layers * heads

    def figures(place: int) -> dict[str, Any]:
        share = place / total
        if not predicts:
            return {"perplexity_ratio": None, "recalled": None}
        return {
            "perplexity_ratio": expected(1 + 0.2 * share**2, 0.05 * share),
            "recalled": expected(1 - 0.9 * share**3, 0.1 * share),
        }

    content = {
        "schema": "attngap.plan/1",
        "model": {"name": "tiny", **MODEL, "layers": layers, "heads": heads, "kv_heads": heads // 2},
        "granularity": "head",
        "keep": [[place // heads, place % heads] for place in range(kept)],
        "replacement": {"window": 64, "sinks": 4, "feature_map": "hedgehog"},
        "curve": [
            {"kept": total - place, "text": 0.0001 * place**2, "recall": 0.0003 * place**2, **figures(place)}
            for place in range(total + 1)
        ],
    }
    path.write_text(json.dumps(content))
    return content


def by_length(lengths: tuple[int, ...] = (512, 2048, 8192)) -> list[dict[str, Any]]:
    """Quality of a conversion and its parts that falls off with the length."""
    gaps = {"original": 0.0, "converted": 0.02, "without features": 0.05, "without window": 0.3}
    rows = []
    for length in lengths:
        for part, gap in gaps.items():
            worse = gap * (1 + 0.2 * math.log2(length / 512))
            shares = {"needle": max(0.0, 1 - 3 * worse), "repetition": 0.57 * (1 - worse)}
            rows.append({"length": length, "part": part, "perplexity_ratio": 1 + worse, "divergence": worse, **shares})
    return rows


def receipt(folder: Path, kept: int = 3, heads: int = 24, **changes: Any) -> dict[str, Any]:
    """Write receipt.json of a conversion that overtakes its original between 1024 and 4096 tokens; the content."""
    worse = 1 + 0.2 * (1 - kept / heads) ** 2

    def quality(factor: float) -> dict[str, Any]:
        return {
            "perplexity": 12.0 * factor,
            "perplexity_ratio": factor,
            "divergence": factor - 1,
            "induction": 0.8 / factor,
            "needle": 0.9 / factor,
            "needle_by_place": {"512@0.1": 1.0 / factor, "512@0.9": 0.8 / factor},
        }

    def speed(context: int, decode: float, size: int) -> dict[str, Any]:
        return {"context": context, "prefill": 900.0, "decode": decode, "cache_bytes": size}

    content = {
        "schema": "attngap.receipt/1",
        "model": "tiny",
        "mechanism": "hedgehog",
        "heads": heads,
        "kept": kept,
        "groups": heads // 2,
        "kept_groups": kept,
        "keep": [[place // 6, place % 6] for place in range(kept)],
        "options": {"window": 64, "sinks": 4, "context": 1024},
        "quality": {
            "original": quality(1.0),
            "converted": quality(worse),
            "sinks + window only": quality(worse + 0.1),
            "random heads": quality(worse + 0.2),
        },
        "speed": {
            "original": [speed(1024, 20.0, 40_000_000), speed(4096, 5.0, 160_000_000)],
            "converted": [speed(1024, 10.0, 8_000_000), speed(4096, 10.0, 20_000_000)],
        },
        "notes": ["The joint pass was short."],
        "provenance": PROVENANCE | {"command": "attngap linearize tiny --plan plan.json -o converted"},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "receipt.json").write_text(json.dumps(content))
    return content


def phase(path: Path) -> dict[str, Any]:
    """Write a coarse phase diagram; the content."""
    from attngap.theory.phase import phase as compute

    found = compute(n=2**12, d=66, m=20, b=0.5, kernels=("softmax", "linear"), cells=4)
    content = {"schema": "attngap.phase/1", **found, "provenance": PROVENANCE}
    path.write_text(json.dumps(content))
    return content
