"""From the pieces of a run to one row per head."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attngap.diagnosis.result import Head, Read
from attngap.diagnosis.run import STRESS, DiagnosisRun
from attngap.diagnosis.survey import summary
from attngap.heads.damage import score

MEASURED = ("entropy", "top", "sink", "near", "far", "kappa", "kappa_p10", "kappa_p90", "selecting", "on_sink")
MEASURED += ("n_star", "spread", "logit_ratio")
LINEAR = "is linear already: an earlier conversion replaced it"


def heads(run: DiagnosisRun, tokenizer: PreTrainedTokenizerBase, rank: int | None, *, deep: bool) -> list[Head]:
    """Every head, layer by layer; what was not measured stays None."""
    out = []
    for layer in range(run.shape.layers):
        rows = _statistics(run, layer)
        if deep:
            _add(rows, _errors(run, layer))
            if rank is not None:
                _add(rows, _certificates(run, layer, rank))
            _add(rows, _damages(run, layer, rank))
            for row, pairs in zip(rows, _reads(run, layer, tokenizer), strict=True):
                row["reads"] = pairs
        group = run.shape.heads // run.shape.kv_heads
        for head, row in enumerate(rows):
            place = {"id": f"{layer}.{head}", "layer": layer, "head": head, "kv_head": head // group}
            linear = row["reason"] == LINEAR
            out.append(Head(**place, verdict="linear" if linear else "replace", **row))
    _weigh(out)
    return out


def cross_rows(run: DiagnosisRun) -> list[dict[str, float | int | None]]:
    """Cross-attention, apart: statistics only."""
    out = []
    for layer in range(run.shape.cross):
        found = summary([_piece(run, f"cross-{i}-{layer}") for i in range(len(run.text))])
        for head in range(run.shape.heads):
            row = {name: _number(found[name][head]) for name in ("entropy", "top", "kappa", "selecting", "n_star")}
            out.append({"layer": layer, "head": head, **row})
    return out


def patterns(run: DiagnosisRun) -> dict[str, np.ndarray]:
    """Pictures of all heads, `(heads, 64, 64)` bytes on a square-root scale, for the first passage and for stress."""
    layers = range(run.shape.layers)
    names = {"text": "0", "stress": STRESS}
    return {
        title: torch.cat([_piece(run, f"deep-{name}-{layer}")["pattern"] for layer in layers]).numpy()
        for title, name in names.items()
    }


def coarsening(run: DiagnosisRun) -> tuple[int, int]:
    """How many of the possible cuts the floors tried."""
    pieces = (_piece(run, f"deep-0-{layer}") for layer in range(run.shape.layers))
    cuts, possible = next((piece["cuts"].tolist() for piece in pieces if "cuts" in piece), (0, 0))
    return cuts, possible


def _statistics(run: DiagnosisRun, layer: int) -> list[dict[str, Any]]:
    pieces = [_piece(run, f"rows-{i}-{layer}") for i in range(len(run.text))]
    text, barred = summary(pieces), run.shape.obstacles[layer]
    stress = _piece(run, f"rows-{STRESS}-{layer}")
    rows = []
    for head in range(run.shape.heads):
        row = {name: _number(text[name][head]) for name in MEASURED}
        row |= {name: _number(stress[name][head]) for name in ("previous", "duplicate", "induction")}
        row["stress_far"] = max(0.0, 1 - float(stress["sink"][head] + stress["near"][head]))
        why = LINEAR if pieces[0]["linear"][head] else f"stays: {barred}" if barred else ""
        row |= {"replaceable": not why, "reason": why}
        rows.append(row)
    return rows


def _certificates(run: DiagnosisRun, layer: int, rank: int) -> list[dict[str, Any]]:
    first, stress = _piece(run, f"deep-0-{layer}"), _piece(run, f"deep-{STRESS}-{layer}")
    linear = _piece(run, f"rows-0-{layer}")["linear"]
    read, stress_read = (_piece(run, f"damage-{name}")[f"weighted-{layer}"] for name in ("0", STRESS))
    place = run.options.ranks.index(rank)
    rows: list[dict[str, Any]] = []
    for head in range(run.shape.heads):
        if linear[head]:
            rows.append({})
            continue
        row = {
            "floor": float(first["floor"][head, place]),
            "ceiling": float(first["ceiling"][head, place]),
            "stress_floor": float(stress["floor"][head, place]),
            "stress_ceiling": float(stress["ceiling"][head, place]),
            "floors": first["floor"][head].tolist(),
            "ceilings": first["ceiling"][head].tolist(),
            "stress_floors": stress["floor"][head].tolist(),
            "stress_ceilings": stress["ceiling"][head].tolist(),
            "weighted_floor": float(read[head, place]),
            "stress_weighted_floor": float(stress_read[head, place]),
            "weighted_floors": read[head].tolist(),
            "stress_weighted_floors": stress_read[head].tolist(),
            "far_weight": float(first["far"][head]),
            "spectrum": [float(f"{value:.4g}") for value in first["spectrum"][head].tolist()],
        }
        rows.append(row)
    return rows


def _errors(run: DiagnosisRun, layer: int) -> list[dict[str, Any]]:
    """Of the fitted replacement and of untrained mechanisms, where the layer can be replaced."""
    first, stress = _piece(run, f"deep-0-{layer}"), _piece(run, f"deep-{STRESS}-{layer}")
    linear = _piece(run, f"rows-0-{layer}")["linear"]
    untrained = {name.removeprefix("error."): error for name, error in first.items() if name.startswith("error.")}
    return [
        {
            "fit": float(first["fit"][head]),
            "stress_fit": float(stress["fit"][head]),
            "monotonicity": _number(first["monotonicity"][head]),
            "errors": {name: float(untrained[name][head]) for name in sorted(untrained)},
        }
        if "fit" in first and not linear[head]
        else {}
        for head in range(run.shape.heads)
    ]


def _damages(run: DiagnosisRun, layer: int, rank: int | None) -> list[dict[str, Any]]:
    """Damage is the mean over text passages; the ceiling's is to the fit's as on the first passage.

    A head without a replacement has no damage, but what the best weights of a rank would cost it is known all the same.
    """
    linear, fits = _piece(run, f"rows-0-{layer}")["linear"], "fit" in _piece(run, f"deep-0-{layer}")
    labels = run.shape.is_language_model
    pieces = {name: _piece(run, f"damage-{name}")[str(layer)] for name, _ in run.damaged()}
    found = {name: score(piece, is_language_model=labels) for name, piece in pieces.items()}
    stress, first = found.pop(STRESS), found["0"]  # (1 + ranks, h)
    fitted = torch.stack([one[0] for one in found.values()]).mean(0)
    place = None if rank is None else run.options.ranks.index(rank)
    out = []
    for head in range(run.shape.heads):
        row: dict[str, Any] = {}
        if not linear[head] and place is not None:
            row["recall_unavoidables"] = stress[1:, head].tolist()
            row["unavoidables"] = first[1:, head].tolist()
            row["unavoidable"] = row["unavoidables"][place]
            row["recall_unavoidable"] = row["recall_unavoidables"][place]
        if not linear[head] and fits:
            damage = float(fitted[head])
            row |= {"damage": damage, "recall_damage": float(stress[0, head])}
            if place is not None:
                best = first[1:, head] / first[0, head].clamp(min=torch.finfo(first.dtype).tiny) * damage
                unavoidable = min(float(best[place]), damage)
                row |= {"unavoidables": best.tolist(), "unavoidable": unavoidable, "lost": damage - unavoidable}
                # The best weights of a rank can cost more than the fit, which has its window besides: all of it then.
                row["recall_unavoidable"] = min(row["recall_unavoidable"], row["recall_damage"])
                row["recall_lost"] = row["recall_damage"] - row["recall_unavoidable"]
        out.append(row)
    return out


def _weigh(rows: list[Head]) -> None:
    """Importance: share of all damage on text plus share of all damage on recall."""
    able = [head for head in rows if head.replaceable and head.damage is not None]
    text = sum(head.damage or 0.0 for head in able) or 1.0
    recall = sum(head.recall_damage or 0.0 for head in able) or 1.0
    for head in able:
        head.importance = ((head.damage or 0.0) / text + (head.recall_damage or 0.0) / recall) / 2


def _reads(run: DiagnosisRun, layer: int, tokenizer: PreTrainedTokenizerBase) -> list[list[Read]]:
    piece, tokens = _piece(run, f"deep-0-{layer}"), run.text[0].tolist()

    def word(place: int) -> str:
        return str(tokenizer.decode([tokens[place]])) if place < len(tokens) else ""

    out = []
    for head in range(run.shape.heads):
        found = zip(*(piece[f"read_{name}"][head].tolist() for name in ("query", "key", "weight")), strict=True)
        out.append(
            [
                Read(at=q, query=word(q), key=word(k), after=word(k + 1), distance=q - k, weight=round(w, 4))
                for q, k, w in found
                if w > 0
            ]
        )
    return out


def _add(rows: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    for row, extra in zip(rows, more, strict=True):
        row |= extra


def _piece(run: DiagnosisRun, name: str) -> dict[str, Tensor]:
    return run.checkpoint.require(name)


def _number(value: Tensor) -> float | None:
    """JSON has no NaN: what is not defined is None."""
    return float(value) if bool(value.isfinite()) else None
