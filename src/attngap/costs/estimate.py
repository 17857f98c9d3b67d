"""Seconds, memory and disk of a diagnosis and a conversion, and what the converted model would save."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from transformers import PretrainedConfig

from attngap.conversion.fitting import ON_RAY
from attngap.conversion.options import ConversionOptions
from attngap.costs import view
from attngap.costs.gain import Gain, gains
from attngap.costs.machine import Rates, measure_rates, remembered
from attngap.costs.memory import HALF, MORE, Space, conversion_space, diagnosis_space
from attngap.costs.rehearsal import LAYERS, Passes, Rehearsal, rehearse_conversion, rehearse_diagnosis, text_of
from attngap.costs.shape import ModelShape, shape_of
from attngap.diagnosis.joint import RECALL_PASSAGES, TEXT_PASSAGES
from attngap.diagnosis.options import MAX_TOKENS, DiagnosisOptions
from attngap.errors import AttngapError
from attngap.models.placement import check_products, memory_of, parse_device, parse_dtype
from attngap.options import KEEP
from attngap.provenance import provenance

MODEL = "the model"  # the stage that is none: products of the model's own, in all of them
HASHED = {"diagnose": 2, "linearize": 12}  # bytes hashed for each weight: two a fingerprint, four a hash
CONTEXTS = (4096, 32768, 131072)  # at which the gain is told


class Cost(BaseModel):
    """Of one verb. `memory` is all of it, weights too; `beyond` is what comes on top of them."""

    model_config = ConfigDict(extra="forbid")
    seconds: float
    stages: dict[str, float]  # seconds, about
    memory: int  # bytes
    beyond: int
    disk: int


class Estimate(BaseModel):
    """What a model would cost here, and what converting it would gain."""

    model_config = ConfigDict(extra="forbid")
    model: str
    parameters: int
    layers: int
    heads: int
    replaceable_layers: int
    dtype: str
    device: str
    workers: int
    weights: int  # bytes
    available: int | None  # bytes of memory that the device has left
    diagnose: Cost
    linearize: Cost
    keep: float
    gains: list[Gain]
    notes: list[str]
    options: dict[str, dict[str, Any]]
    provenance: dict[str, Any]

    def __repr_args__(self):
        """A line for people; `model_dump` has everything."""
        yield "model", self.model
        for verb, cost in (("diagnose", self.diagnose), ("linearize", self.linearize)):
            yield verb, f"{view.time_of(cost.seconds)}, {cost.memory / 1e9:.1f} GB"

    def _repr_html_(self) -> str:
        return view.to_html(self)


def estimate(
    model: str | os.PathLike[str] | PretrainedConfig,
    *,
    dtype: torch.dtype | str = "float32",
    device: torch.device | str = "cpu",
    workers: int = 1,
    keep: float = KEEP,
    diagnosis: DiagnosisOptions | None = None,
    conversion: ConversionOptions | None = None,
    contexts: Sequence[int] = CONTEXTS,
    text_tokens: int | None = None,
    anew: bool = False,
    trust_remote_code: bool = False,
) -> Estimate:
    """What `attngap.diagnose` and `attngap.linearize` of a model cost on this machine, and what the latter gains.

    `model` is all that `attngap.load` takes, or a config; of a model only the config is read. The machine is timed for
    this shape of heads once, in under a minute, and remembered; `anew` times it again. `workers` is the number of cores
    of a Ray cluster, each as fast as this machine. `text_tokens` is the length of a text that is short.

    >>> attngap.estimate("meta-llama/Llama-3.1-8B").linearize.seconds  # doctest: +SKIP
    """
    if workers < 1:
        raise AttngapError(f"workers must be at least 1, got {workers}")
    place, number = parse_device(device) or torch.device("cpu"), parse_dtype(dtype)
    shape = shape_of(model, trust_remote_code=trust_remote_code)
    if not isinstance(number, torch.dtype):
        number = _own_dtype(model, trust_remote_code)
    check_products(number, str(place))
    looked = (diagnosis or DiagnosisOptions()).but(**_within(shape, diagnosis))
    changed = (conversion or ConversionOptions()).but(**_within(shape, conversion))
    if changed.max_ppl_ratio is None:
        changed = changed.but(keep=keep)
    where: dict[str, Any] = {"dtype": number, "device": place}
    rates, rehearsals = _calibrated(shape, looked, changed, where, text_tokens, anew)
    size = number.itemsize
    spaces = {"diagnose": diagnosis_space(shape, looked, size), "linearize": conversion_space(shape, changed, size)}
    shares = {"diagnose": _diagnosis_shares(shape, looked, rates), "linearize": {"fitting layers": (ON_RAY, 0.0)}}
    costs = {
        verb: _cost(verb, shape, each, rates, spaces[verb], size, workers, shares[verb])
        for verb, each in rehearsals.items()
    }
    return Estimate(
        model=shape.name,
        parameters=shape.parameters,
        layers=shape.layers,
        heads=shape.heads,
        replaceable_layers=shape.replaceable,
        dtype=str(number).removeprefix("torch."),
        device=str(place),
        workers=workers,
        weights=shape.parameters * size,
        available=memory_of(place),
        diagnose=costs["diagnose"],
        linearize=costs["linearize"],
        keep=keep,
        gains=gains(shape, changed, keep, contexts, rates.bytes_read, size),
        notes=_notes(shape, costs, memory_of(place), size),
        options={"diagnose": looked.record(), "linearize": changed.record()},
        provenance=provenance(),
    )


def _within(shape: ModelShape, given: Any) -> dict[str, Any]:
    """A context that the model has positions for, where none was asked for."""
    if given is not None or shape.positions is None or shape.positions >= DiagnosisOptions.default("context"):
        return {}
    return {"context": shape.positions}


def _own_dtype(model: Any, trust_remote_code: bool) -> torch.dtype:
    from attngap.models.load import load_config

    config = model if isinstance(model, PretrainedConfig) else load_config(model, trust_remote_code=trust_remote_code)
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _calibrated(
    shape: ModelShape,
    looked: DiagnosisOptions,
    changed: ConversionOptions,
    where: dict[str, Any],
    text_tokens: int | None,
    anew: bool,
) -> tuple[Rates, dict[str, Rehearsal]]:
    """Rates and rehearsals, as they are remembered or made now."""
    text = text_of(text_tokens)
    heads = {"group": shape.group, "dim": shape.dim, "vocabulary": shape.vocabulary, "positions": shape.positions}
    key = {name: str(each) for name, each in where.items()} | {"text": text_tokens}
    sizes = {"hidden": shape.hidden, "layer": shape.layer_parameters}
    found = remembered(
        {"what": "rates, quick products"} | sizes | key,
        lambda: dataclasses.asdict(measure_rates(shape, **where)),
        anew=anew,
    )
    rehearsals: dict[str, Rehearsal] = {}
    for verb, rehearse, options in (
        ("diagnose", rehearse_diagnosis, looked),
        ("linearize", rehearse_conversion, changed),
    ):
        made = remembered(
            {"what": verb, "miniatures": LAYERS, "options": options.record()} | heads | key,
            lambda rehearse=rehearse, options=options: dataclasses.asdict(
                rehearse(shape, options, **where, text=text)  # pyright: ignore[reportArgumentType]
            ),
            anew=anew,
        )
        passes = Passes(**made.pop("passes"))
        rehearsals[verb] = Rehearsal(**made, passes=passes)
    return Rates(**found), rehearsals


Shares = dict[str, tuple[int, float]]


def _diagnosis_shares(shape: ModelShape, options: DiagnosisOptions, rates: Rates) -> Shares:
    """How many jobs a stage gives to a cluster, and the seconds of it that stay where the command was given.

    Layers become jobs as the model, which runs here, comes to them.
    """
    passages, length = options.passages, min(options.context, MAX_TOKENS)
    walked = 2 * (passages + 2) * length * shape.layers * shape.layer_parameters / rates.products
    jobs = {"statistics": passages + 1, "floors and fits": shape.layers, "damage": passages + 1 + MORE}
    jobs["replacements"] = TEXT_PASSAGES + RECALL_PASSAGES
    return {name: (count, 0.0) for name, count in jobs.items()} | {MODEL: (passages + 1, walked)}


def _cost(
    verb: str,
    shape: ModelShape,
    found: Rehearsal,
    rates: Rates,
    space: Space,
    size: int,
    workers: int,
    shares: Shares,
) -> Cost:
    groups = shape.kv_heads * (shape.layers if verb == "diagnose" else shape.replaceable)
    stages = {name: share * groups * found.key_head for name, share in found.stages.items()}
    stages[MODEL] = found.once + _products(shape, found.passes, rates, size)
    for name in stages.keys() & shares.keys():
        jobs, here = shares[name]
        here = min(here, stages[name])
        stages[name] = here + (stages[name] - here) / min(workers, jobs)
    stages[MODEL] += HASHED[verb] * shape.parameters / rates.hashed
    weights = shape.parameters * size
    return Cost(
        seconds=sum(stages.values()),
        stages=stages,
        memory=weights + space.memory,
        beyond=space.memory,
        disk=space.disk,
    )


def _products(shape: ModelShape, passes: Passes, rates: Rates, size: int) -> float:
    """Seconds of the model's own products: two operations a weight and token, or reading the weights."""
    ahead = 2 * (passes.forward * shape.layers * shape.layer_parameters + passes.head_forward * shape.head_parameters)
    back = 2 * (passes.backward * shape.layers * shape.layer_parameters + passes.head_backward * shape.head_parameters)
    read = size * (passes.reads * shape.layers * shape.layer_parameters + passes.head_reads * shape.head_parameters)
    return ahead / rates.products + back / rates.products_backward + read / rates.bytes_read


def _notes(shape: ModelShape, costs: dict[str, Cost], available: int | None, size: int) -> list[str]:
    notes = ["loading the weights, and the receipt of a conversion (attngap eval), are not counted"]
    if shape.replaceable < shape.layers:
        notes.append(f"{shape.layers - shape.replaceable} of {shape.layers} layers cannot be replaced")
    short = [verb for verb, cost in costs.items() if available is not None and cost.memory > available]
    if short and available is not None:
        narrower = "take --dtype bfloat16, or " if size > HALF else ""
        notes.append(
            f"{' and '.join(short)} would need more memory than the {available / 1e9:.1f} GB that are left here: "
            f"{narrower}leave part of the weights on disk (--max-memory)"
        )
    return notes
