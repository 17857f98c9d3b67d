"""Every kind of file that is read: a whole one, and what reads it. How it is damaged: `damage.py`."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import attngap
from attngap.conversion.receipt import Receipt
from attngap.diagnosis.result import Diagnosis
from attngap.heads.passages import read as read_text
from attngap.longcontext.suite import Score, Suite, load_suite
from attngap.longcontext.suite import _read as read_answers
from attngap.models.plan import Plan
from attngap.models.save import Base, conversion_record, set_conversion
from attngap.models.swap import swap
from attngap.probes import checkpoint as training
from attngap.probes.sweep import load_sweep
from attngap.report import results
from attngap.report.build import report_page
from attngap.storage.checkpoint import Checkpoint
from attngap.storage.runs import Runs
from tests import made_up
from tests.conversion.small import plan
from tests.trust.damage import Kind, damaged
from tests.trust.outcome import Outcome
from tests.zoo import mechanisms, tiny, tokenizer

TOKENS = torch.arange(1, 31)[None]
SWEEP = """
name = "small"
[[grid]]
tasks = ["mqar", "copy"]
mechanisms = ["softmax", "elu"]
seeds = 2
learning_rates = [1e-3, 1e-2]
model = {layers = 1, width = [32, 64]}
train = {steps = 10}
"""


def damage(name: str, number: int, seed: int) -> Outcome:
    """Read `number` damaged versions of this kind of file; what is neither read nor refused is a fault."""
    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[name](Path(folder))
        return damaged(name, kind, number, seed)


def converted(folder: Path) -> Path:
    """A converted model with its base inside."""
    model = tiny()
    made = mechanisms(model)
    new = swap(model, {layer: (m, [1]) for layer, m in made.items()})
    options = {
        layer: {"kv_heads": 2, "feature_map": "prototype", "window": 5, "sinks": 2, "relative": False, "gain": "query"}
        for layer in made
    }
    base = Base.of(model, "base")
    set_conversion(new, conversion_record(new, options, plan(model), base, lora=0))
    attngap.save(new, folder, tokenizer=tokenizer(), original=model)
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return attngap.load(folder)[0](TOKENS, use_cache=False).logits


def in_folder(folder: Path, *, name: str, hashed: bool = False, older: bool = False) -> Kind:
    """A file of a converted folder; `older` is one of the schema before, which had no hashes."""
    converted(folder)
    if older:
        record = json.loads((folder / name).read_text())
        for key in ("adapter", "seal"):
            del record[key]
        (folder / name).write_text(json.dumps(record | {"schema": "attngap.conversion/1"}))
    if hashed:
        return Kind(folder / name, lambda: logits(folder), logits(folder))
    return Kind(folder / name, lambda: attngap.load(folder))


def saved_plan(folder: Path) -> Kind:
    path = folder / "plan.json"
    plan(tiny()).save(path)
    return Kind(path, lambda: Plan.load(path))


def receipt(folder: Path) -> Kind:
    made_up.receipt(folder)
    return Kind(folder / "receipt.json", lambda: Receipt.load(folder))


def diagnosis(folder: Path) -> Kind:
    made_up.diagnosis(folder)
    return Kind(folder / "diagnosis.json", lambda: Diagnosis.load(folder).plan(keep=0.1))


def sweep(folder: Path) -> Kind:
    path = folder / "sweep.toml"
    path.write_text(SWEEP)
    return Kind(path, lambda: load_sweep(path))


def database(folder: Path) -> Kind:
    path = made_up.runs(folder / "runs.db")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=DELETE")

    def read() -> None:
        with contextlib.closing(Runs(path, readonly=True)) as runs:
            list(runs.records())
            list(runs.progress())

    return Kind(path, read)


def reported(folder: Path, *, name: str) -> Kind:
    """A file that a report is made from, among whole ones."""
    made_up.diagnosis(folder, layers=1, heads=2, side=8)
    made_up.receipt(folder)
    made_up.plan(folder / "plan.json", layers=1, heads=2, kept=1)
    made_up.phase(folder / "phase.json")
    texts = {"original": "a", "converted": "b"}
    samples = {"schema": "attngap.samples/1", "model": {"name": "tiny"}, "prompt": "p", "texts": texts}
    (folder / "samples.json").write_text(json.dumps(samples | {"provenance": made_up.PROVENANCE}))
    made_up.runs(folder / "runs.db")
    made: set[str] = set()  # a page follows from what was read, so what was read before needs no page again

    def read() -> None:
        found = results.read([folder])
        pictures = hashlib.sha256((folder / "patterns.npz").read_bytes()).hexdigest()
        if (key := f"{found} {pictures}") not in made:
            report_page(found)
            made.add(key)

    return Kind(folder / name, read)


def shelf(folder: Path) -> Kind:
    """Whatever lies in a folder, the explorer lists the others."""
    from attngap.explorer.shelf import Shelf

    made_up.diagnosis(folder / "a", layers=1, heads=2, side=8)
    made_up.receipt(folder / "b")
    made_up.runs(folder / "b" / "runs.db")

    def read() -> None:
        listed = Shelf([folder]).listing()
        Shelf([folder]).verdicts(tiny().config)
        assert {"receipt", "probe runs"} <= {row["kind"] for row in listed}

    return Kind(folder / "a" / "diagnosis.json", read)


def gguf(folder: Path) -> Kind:
    from tests.models.test_gguf import write

    path, cache = folder / "tiny.gguf", folder / "cache"
    write(path)
    os.environ["ATTNGAP_CACHE"] = str(cache)

    def read() -> None:
        try:
            attngap.load(path)
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    head = path.read_bytes().index(b"blk.1.ffn_down") + 100  # behind the names of tensors every byte is a weight
    return Kind(path, read, head=head)


def piece(folder: Path) -> Kind:
    """A damaged piece is dropped with a word: None comes back."""
    store, whole = Checkpoint(folder, {"model": "tiny"}), torch.ones(3, 4)
    store.put("layer-0", {"weight": whole, "steps": torch.tensor(3)})
    (path,) = folder.glob("*.piece")

    def read() -> torch.Tensor:
        found = Checkpoint(folder, {"model": "tiny"}).get("layer-0")
        return whole if found is None else found["weight"]

    return Kind(path, read, whole)


def training_checkpoint(folder: Path) -> Kind:
    path = folder / "run.safetensors"

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = fresh()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    training.save(path, model, optimizer, training.Progress(step=7, curve=[(1, 0.5, 0.25)]))
    whole = model.state_dict()["weight"].clone()

    def read() -> torch.Tensor:
        """The weights that were saved; those of a damaged checkpoint count as such, since it is dropped."""
        model, optimizer = fresh()
        found = training.load(path, model, optimizer)
        return whole if found is None else model.state_dict()["weight"]

    return Kind(path, read, whole)


def suite(folder: Path) -> Kind:
    path = folder / "suite.json"
    score = Score(task="needle", length=64, model="tiny", questions=3, score=0.5, low=0.1, high=0.9, chance=0.1)
    path.write_text(Suite(models=["tiny"], examples=3, seed=0, scores=[score]).model_dump_json(by_alias=True))
    return Kind(path, lambda: load_suite(path))


def answers(folder: Path) -> Kind:
    path, key = folder / "answers.jsonl", {"models": ["tiny"], "seed": 0, "text": 100}
    rows = [key, *({"key": f"needle/64/{i}", "answers": {"tiny": [1.0], "blind": [0.0]}} for i in range(5))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Kind(path, lambda: read_answers(path, key))


def text(folder: Path) -> Kind:
    path = folder / "text.txt"
    path.write_text("Grüße, the cat sat on the mat. " * 30)
    return Kind(path, lambda: read_text([path]))


KINDS: dict[str, Callable[[Path], Kind]] = {
    "record of a conversion": functools.partial(in_folder, name="attngap.json", hashed=True),
    "record of the schema before": functools.partial(in_folder, name="attngap.json", older=True),
    "adapter": functools.partial(in_folder, name="adapter.safetensors", hashed=True),
    "config of a conversion": functools.partial(in_folder, name="config.json"),
    "config of a base": functools.partial(in_folder, name="base/config.json"),
    "weights of a base": functools.partial(in_folder, name="base/model.safetensors", hashed=True),
    "tokenizer": functools.partial(in_folder, name="tokenizer.json"),
    "config of a tokenizer": functools.partial(in_folder, name="tokenizer_config.json"),
    "GGUF header": gguf,
    "plan": saved_plan,
    "receipt": receipt,
    "diagnosis": diagnosis,
    "sweep file": sweep,
    "run database": database,
    "piece of a run": piece,
    "training checkpoint": training_checkpoint,
    "results of a suite": suite,
    "answers of a suite": answers,
    "text": text,
    "explorer's shelf": shelf,
    **{
        f"report, {name}": functools.partial(reported, name=name)
        for name in (
            "diagnosis.json",
            "receipt.json",
            "plan.json",
            "phase.json",
            "samples.json",
            "runs.db",
            "patterns.npz",
        )
    },
}
