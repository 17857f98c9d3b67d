"""Sizes that people have: half precision against single, and seconds and memory against the number of parameters.

python benchmarks/sizes.py dtype --context 512 --passages 2
python benchmarks/sizes.py all sizes.jsonl --sizes 135M,360M,1.1B    # what the file lacks, in processes of their own
python benchmarks/sizes.py table sizes.jsonl
python benchmarks/sizes.py measure 1.1B diagnose --layers 6          # one part
python benchmarks/sizes.py write 1.1B folder && python benchmarks/sizes.py load folder    # a converted folder

Models of `measure` are Llamas with random weights in float32, run in one thread, so that CPU seconds mean the same on a
busy machine. Both verbs read 1,024 tokens at a time and do a stated part of what they do by default: see WORK.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import LlamaConfig, LlamaForCausalLM

import attngap
from attngap.conversion.options import ConversionOptions
from attngap.diagnosis.options import DiagnosisOptions
from attngap.heads.passages import language_reference
from attngap.provenance import provenance

# Of models that people have: SmolLM2 of two sizes, TinyLlama, Llama 3.2; the vocabulary is SmolLM2's for all of them.
SIZES = {
    "135M": {"hidden": 576, "mlp": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "tied": True},
    "360M": {"hidden": 960, "mlp": 2560, "layers": 32, "heads": 15, "kv_heads": 5, "tied": True},
    "1.1B": {"hidden": 2048, "mlp": 5632, "layers": 22, "heads": 32, "kv_heads": 4, "tied": False},
    "3B": {"hidden": 3072, "mlp": 8192, "layers": 28, "heads": 24, "kv_heads": 8, "tied": True},
}
# One passage of four and one rank of four, on a text with room for one more passage; no heads replaced together. A
# third of the calibration tokens at a quarter of the length, a tenth of the steps, nothing measured.
WORK = {
    "diagnose": {"context": 1024, "passages": 1, "ranks": (64,)},
    "linearize": {"context": 1024, "tokens": 4096, "length": 2048, "steps": 10, "joint": 4, "rounds": 1},
}
LETTERS = 9000  # of text for `diagnose`: its calibration part has room for one passage of 1,024 tokens
SAMPLE_SECONDS = 0.05


def config_of(size: str, layers: int | None = None) -> LlamaConfig:
    s = SIZES[size]
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=s["hidden"],
        intermediate_size=s["mlp"],
        num_hidden_layers=layers or s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        tie_word_embeddings=s["tied"],
        max_position_embeddings=8192,
    )


def random_llama(size: str, layers: int | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config_of(size, layers)).eval()


def measure(size: str, verb: str, layers: int | None = None) -> dict[str, float | str]:
    """CPU seconds, and the largest memory and disk beyond the weights, of one verb on one size, or on its first layers.

    Memory is what cannot be dropped; pages of mapped files can. It counts from the model on: kernels, which are loaded
    before the clock runs, are part of it.
    """
    torch.set_num_threads(1)
    tokenizer = attngap.load("smollm2")[1]
    model = random_llama(size, layers)
    held = _status("RssAnon")
    warm_up(tokenizer)
    text = "\n\n".join(language_reference())
    with tempfile.TemporaryDirectory() as folder:
        most, start = _Largest(Path(folder), held), time.process_time()
        if verb == "diagnose":
            found = attngap.diagnose(model, tokenizer, text[:LETTERS], directory=f"{folder}/out", **WORK[verb])
        else:
            _, found = attngap.linearize(
                model, tokenizer, text=text, measured=False, directory=f"{folder}/out", **WORK[verb]
            )
        most.stop()
    weights = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    return {
        "size": size,
        "layers": layers or SIZES[size]["layers"],
        "verb": verb,
        "parameters": weights,
        "seconds": round(time.process_time() - start, 1),
        "stages": found.seconds,
        "gigabytes": round(most.memory / 1e9, 3),
        "layer_gigabytes": round(4 * layer / 1e9, 3),
        "disk_gigabytes": round(most.disk / 1e9, 3),
        "commit": str(provenance().get("commit")),
    }


def foretell(size: str, verb: str, layers: int | None = None) -> dict[str, float | str]:
    """What `attngap.estimate` says of the same work, on this machine as it is now."""
    torch.set_num_threads(1)
    # The other verb is estimated as well, so it gets little to do.
    work = {"diagnose": {"context": 64, "passages": 1, "ranks": (8,)}, "linearize": {"context": 64, "tokens": 256}}
    work["linearize"] |= {"length": 64, "steps": 1, "joint": 1, "rounds": 1}
    work[verb] = WORK[verb]
    words = attngap.load("smollm2")[1]
    tokens = len(words("\n\n".join(language_reference())[:LETTERS])["input_ids"]) if verb == "diagnose" else None
    start = time.monotonic()
    found = attngap.estimate(
        config_of(size, layers),
        diagnosis=DiagnosisOptions(**work["diagnose"]),
        conversion=ConversionOptions(**work["linearize"]),
        text_tokens=tokens,
        anew=True,
    )
    cost = getattr(found, verb)
    return {
        "size": size,
        "layers": found.layers,
        "verb": f"estimate {verb}",
        "parameters": found.parameters,
        "seconds": round(cost.seconds, 1),
        "gigabytes": round(cost.beyond / 1e9, 3),
        "calibration_seconds": round(time.monotonic() - start, 1),
    }


def write_folder(size: str, folder: Path, dtype: str) -> None:
    """A base with random weights and its converted folder; one step of fitting, for loading does not care."""
    tokenizer = attngap.load("smollm2")[1]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(size)).eval().to(getattr(torch, dtype))
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    few = {"context": 64, "tokens": 128, "length": 64, "steps": 1, "joint": 0, "rounds": 0}
    place = {"directory": folder / "converted", "name": str(folder / "base"), "overwrite": True}
    attngap.linearize(model, tokenizer, measured=False, **few, **place)


def load_folder(folder: Path) -> dict[str, float]:
    """Seconds and peak memory of loading a converted folder; checks of its hashes included."""
    torch.set_num_threads(1)
    attngap.load("smollm2")  # what is imported once
    held = _status("RssAnon")
    most = _Largest(folder / "nothing", held)
    wall, cpu = time.monotonic(), time.process_time()
    model, _ = attngap.load(folder / "converted", dtype="auto")
    seconds = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
    most.stop()
    weights = sum(p.nbytes for p in model.parameters())
    sizes = {"weights": weights, "most_anonymous": most.memory, "peak_with_mapped_files": _status("VmHWM")}
    return seconds | {name: round(x / 1e9, 3) for name, x in sizes.items()}


def measure_all(file: Path, sizes: list[str]) -> None:
    """Every part that the file lacks: first measured, then estimated, each in a process of its own."""
    for size in sizes:
        for verb in (*WORK, *(f"estimate {each}" for each in WORK)):
            if any((row["size"], row["verb"]) == (size, verb) for row in _rows(file)):
                continue
            what = ["measure", size, verb] if verb in WORK else ["foretell", size, verb.split()[1]]
            done = subprocess.run([sys.executable, __file__, *what], stdout=subprocess.PIPE, text=True, check=True)
            with file.open("a") as rows:
                rows.write(done.stdout.splitlines()[-1] + "\n")


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(file: Path) -> str:
    """Measured beside estimated, and by which power of the number of parameters each grows."""
    rows = {(row["size"], row["verb"]): row for row in _rows(file)}
    lines = [
        "| model | parameters | verb | seconds, measured | estimated | GB, measured | estimated | a layer's weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (size, verb), one in rows.items():
        if verb not in WORK:
            continue
        other = rows.get((size, f"estimate {verb}"), {})
        told = [f"{other[key]:{form}}" if other else "-" for key, form in (("seconds", ".0f"), ("gigabytes", ".2f"))]
        lines.append(
            f"| {size}, {one['layers']} layers | {one['parameters'] / 1e6:,.0f}M | {verb} | {one['seconds']:.0f} | "
            f"{told[0]} | {one['gigabytes']:.2f} | {told[1]} | {one['layer_gigabytes']:.3f} |"
        )
    for verb in WORK:
        own = [row for (_, each), row in rows.items() if each == verb]
        if len(own) > 1:
            x, *y = (np.log([row[key] for row in own]) for key in ("parameters", "seconds", "gigabytes"))
            grows = [np.polyfit(x, each, 1)[0] for each in y]
            lines.append(f"{verb}: seconds grow as parameters ** {grows[0]:.2f}, gigabytes as ** {grows[1]:.2f}")
    return "\n".join(lines)


def warm_up(tokenizer) -> None:
    """Kernels are compiled, or read, before a clock runs."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    attngap.linearize(
        LlamaForCausalLM(config).eval(),
        tokenizer,
        measured=False,
        context=256,
        tokens=1024,
        length=2048,
        steps=2,
        joint=2,
    )


def _status(name: str) -> int:
    """Bytes, as Linux counts them for this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


class _Largest(threading.Thread):
    """Looks now and then how much memory this process has beyond what it held, and how much is in a folder."""

    def __init__(self, folder: Path, held: int):
        super().__init__(daemon=True)
        self.folder, self.held, self.over = folder, held, threading.Event()
        self.disk = self.memory = 0
        self.start()

    def run(self) -> None:
        while not self.over.wait(SAMPLE_SECONDS):
            self.memory = max(self.memory, _status("RssAnon") - self.held)
            self.disk = max(self.disk, sum(_size(path) for path in self.folder.rglob("*")))

    def stop(self) -> None:
        self.over.set()
        self.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # gone since it was listed
        return 0


def compare_dtypes(context: int, passages: int, dtype: str, model: str) -> dict[str, float]:
    """Diagnose the same model in float32 and in half precision: verdicts that agree, rank correlations of damage."""
    found, seconds = {}, {}
    for name in ("float32", dtype):
        loaded, tokenizer = attngap.load(model, dtype=getattr(torch, name))
        start = time.process_time()
        found[name] = attngap.diagnose(loaded, tokenizer, context=context, passages=passages, ranks=(64,), quiet=False)
        seconds[name] = round(time.process_time() - start, 1)
        del loaded
    one, other = (found[name].heads for name in ("float32", dtype))
    pairs = list(zip(one, other, strict=True))
    return {
        "heads": len(pairs),
        "same_verdict": sum(a.verdict == b.verdict for a, b in pairs) / len(pairs),
        "same_kind": sum(a.kind == b.kind for a, b in pairs) / len(pairs),
        "damage": float(spearmanr([a.damage for a in one], [b.damage for b in other]).statistic),
        "recall_damage": float(spearmanr([a.recall_damage for a in one], [b.recall_damage for b in other]).statistic),
        "largest_entropy_change": max(abs(a.entropy - b.entropy) for a, b in pairs),
        **{f"seconds_{name}": value for name, value in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    half = verbs.add_parser("dtype")
    half.add_argument("--model", default="smollm2")
    half.add_argument("--dtype", default="bfloat16")
    half.add_argument("--context", type=int, default=512)
    half.add_argument("--passages", type=int, default=2)
    for name in ("measure", "foretell"):
        one = verbs.add_parser(name)
        one.add_argument("size", choices=list(SIZES))
        one.add_argument("verb_measured", choices=list(WORK), metavar="verb")
        one.add_argument("--layers", type=int)
    write = verbs.add_parser("write")
    write.add_argument("size", choices=list(SIZES))
    write.add_argument("folder", type=Path)
    write.add_argument("--dtype", default="bfloat16")
    verbs.add_parser("load").add_argument("folder", type=Path)
    every = verbs.add_parser("all")
    every.add_argument("file", type=Path)
    every.add_argument("--sizes", default="135M,360M,1.1B")
    verbs.add_parser("table").add_argument("file", type=Path)
    chosen = parser.parse_args()
    if chosen.verb in ("measure", "foretell"):
        part = measure if chosen.verb == "measure" else foretell
        print(json.dumps(part(chosen.size, chosen.verb_measured, chosen.layers)))
    elif chosen.verb == "all":
        measure_all(chosen.file, chosen.sizes.split(","))
    elif chosen.verb == "write":
        write_folder(chosen.size, chosen.folder, chosen.dtype)
    elif chosen.verb == "load":
        print(json.dumps(load_folder(chosen.folder)))
    elif chosen.verb == "table":
        print(table(chosen.file))
    else:
        print(json.dumps(compare_dtypes(chosen.context, chosen.passages, chosen.dtype, chosen.model), indent=1))


if __name__ == "__main__":
    main()
