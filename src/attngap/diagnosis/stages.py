"""The passes over the model. Each leaves its pieces with the run and skips those that are there already."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from attngap.diagnosis.layers import examine, fit, monotonicity, untrained_errors
from attngap.diagnosis.linear import with_mixing
from attngap.diagnosis.options import MAX_TOKENS
from attngap.diagnosis.run import STRESS, DiagnosisRun
from attngap.diagnosis.survey import survey
from attngap.diagnosis.tasks import Task, performing
from attngap.diagnosis.weighted import ReadWeights
from attngap.heads.damage import label_directions, projections, random_directions
from attngap.heads.forward import body_of, embedding, forward
from attngap.heads.inputs import LayerInputs, layer_inputs
from attngap.heads.replacement import build_replacement, output, relative_error
from attngap.models.capture import Call, capture
from attngap.ops.pages import give_back
from attngap.progress import Advance, progress

STRESS_DRAWS = 4  # there is one stress passage and many of text
EMBEDDING_DRAWS = 16  # a passage has one embedding but a label at every token: one direction of it says too little


def take_statistics(run: DiagnosisRun) -> None:
    """One forward pass per passage; every row of every head, no n x n matrix but of heads that are linear already."""
    calls = [f"rows-{{}}-{layer}" for layer in range(run.shape.layers)]
    calls += [f"cross-{{}}-{layer}" for layer in range(run.shape.cross)]
    missing = [
        (name, tokens)
        for name, tokens in run.passages()
        if not all(run.checkpoint.has(call.format(name)) for call in calls)
    ]
    if not missing:
        return
    with (
        progress("statistics", len(missing) * len(calls), quiet=run.quiet) as advance,
        performing(run, advance) as perform,
    ):
        for name, tokens in missing:
            perform(Task(_survey, (name, tokens), note=_title(name), steps=len(calls)))


def _survey(run: DiagnosisRun, name: str, tokens: Tensor, advance: Advance) -> None:
    near = run.options

    def watch(call: Call) -> None:
        piece = f"{'cross' if call.cross else 'rows'}-{name}-{call.layer}"
        if not run.checkpoint.has(piece):
            period = run.period if name == STRESS and not call.cross else None
            one = with_mixing(next(layer_inputs(call)), call)
            run.checkpoint.put(piece, survey(one, window=near.window, sinks=near.sinks, period=period))
        advance(note=f"{_title(name)}, layer {call.layer}")

    _walk(run.model, tokens[:, :MAX_TOKENS] if run.shape.linear else tokens, watch)


@dataclasses.dataclass(frozen=True)
class LayerRead:
    """What the heads of one layer read and wrote, in every sequence of a batch."""

    layer: int
    batch: list[LayerInputs]
    exact: Float[Tensor, "b h t dv"]
    one: LayerInputs  # the sequence whose certificates are wanted, with what its linear heads really read
    first: int  # and its number


def take_floors_and_fits(run: DiagnosisRun) -> None:
    """Floors, ceilings, untrained errors and fits, a layer at a time while the model runs: first text, then stress."""
    text = torch.cat([run.fit_repeats, run.text[:, :MAX_TOKENS]])
    title = "floors and fits" if run.options.ranks else "fits"
    _take_layers(run, f"{title}, text", "0", text, _fit_and_examine, first=1)
    _take_layers(run, f"{title}, stress passage", STRESS, run.stress, _examine, first=0)


def _take_layers(
    run: DiagnosisRun, title: str, name: str, tokens: Tensor, function: Callable[..., None], *, first: int
) -> None:
    """A task for every layer, as the model comes to it."""
    missing = {layer for layer in range(run.shape.layers) if not run.checkpoint.has(f"deep-{name}-{layer}")}
    if not missing:
        return
    with progress(title, len(missing), quiet=run.quiet) as advance, performing(run, advance) as perform:

        def watch(call: Call) -> None:
            if call.cross or call.layer not in missing:
                return
            batch = list(layer_inputs(call))
            read = LayerRead(call.layer, batch, call.output, with_mixing(batch[first], call, first), first)
            perform(Task(function, (name, read), note=f"layer {call.layer}", needs=(f"fit-{call.layer}",)))

        _walk(run.model, tokens, watch)


def _fit_and_examine(run: DiagnosisRun, name: str, read: LayerRead, advance: Advance) -> None:
    if not run.checkpoint.has(f"fit-{read.layer}"):
        advance(0, note=f"layer {read.layer}: fitting")
        able = read.batch[0].replaceable
        weights = fit(read.batch, read.exact, run.replacement).state_dict() if able else {}
        run.checkpoint.put(f"fit-{read.layer}", weights)
    advance(0, note=f"layer {read.layer}: {'floors' if run.options.ranks else 'errors'}")
    _examine(run, name, read, advance)


def _examine(run: DiagnosisRun, name: str, read: LayerRead, advance: Advance) -> None:
    """Certificates of the batch's `first` passage; errors of the fit on that and all later ones."""
    batch, exact, one = read.batch[read.first :], read.exact[read.first :], read.one
    candidate = load_fit(run, read.layer, batch[0])
    found = examine(one, exact[0], run.options.ranks, run.replacement)
    if candidate is not None:
        found |= untrained_errors(one, exact[0], run.replacement)
        errors = [relative_error(output(candidate, one), out) for one, out in zip(batch, exact, strict=True)]
        found["fit"] = torch.stack(errors).mean(0)
        found["monotonicity"] = monotonicity(candidate, batch[0])
    run.checkpoint.put(f"deep-{name}-{read.layer}", found)
    advance(note=f"layer {read.layer}")


def load_fit(run: DiagnosisRun, layer: int, one: LayerInputs):
    """The layer's fitted replacement from its piece; None where nothing can be fitted."""
    if not one.replaceable:
        return None
    candidate, _ = build_replacement(one, run.replacement, positions=one.positions)
    candidate.load_state_dict(run.checkpoint.require(f"fit-{layer}"))
    return candidate.requires_grad_(False)


def estimate_damage(run: DiagnosisRun) -> None:
    """Backward passes on every passage; the ceiling's change is known on the first text passage and on stress."""
    passages = enumerate(run.damaged())
    missing = [(number, *each) for number, each in passages if not run.checkpoint.has(f"damage-{each[0]}")]
    if not missing:
        return
    with (
        progress("damage, backward passes", len(missing), quiet=run.quiet) as advance,
        performing(run, advance) as perform,
    ):
        for number, name, tokens in missing:
            ceilings = tuple(f"deep-{name}-{layer}" for layer in range(run.shape.layers))
            seed = run.options.seed + number
            perform(Task(_damage, (name, tokens, seed), note=_title(name), needs=ceilings, fits=True))


def _damage(run: DiagnosisRun, name: str, tokens: Tensor, seed: int, advance: Advance) -> None:
    advance(0, note=_title(name))
    draws = run.options.draws * (STRESS_DRAWS if name == STRESS else 1)
    tokens = tokens[:, :MAX_TOKENS]
    if run.shape.is_language_model:
        read, directions = lambda: forward(run.model, tokens).logits, functools.partial(label_directions, draws=draws)
    else:  # an encoder is judged by its embedding, in random directions
        read = lambda: embedding(forward(run.model, tokens))  # noqa: E731
        directions = functools.partial(random_directions, draws=draws * EMBEDDING_DRAWS)
    generator = torch.Generator().manual_seed(seed)
    wanted = name in ("0", STRESS) and bool(run.options.ranks)
    weighted = ReadWeights(run.options.ranks, run.replacement) if wanted else None
    found = projections(
        run.model,
        read,
        lambda call: _changes(run, name, call, weighted),
        directions,
        generator,
        observe=None if weighted is None else weighted.add_gradients,
    )
    pieces = {str(layer): one for layer, one in found.items()}
    if weighted is not None:
        pieces |= {f"weighted-{layer}": found for layer, found in sorted(weighted.floors.items())}
    run.checkpoint.put(f"damage-{name}", pieces)
    advance(note=_title(name))


def _changes(run: DiagnosisRun, name: str, call: Call, weighted: ReadWeights | None) -> Tensor:
    """(1 + ranks, h, t, dv): the fitted replacement's change of the output, then the ceiling's for each rank."""
    give_back()  # what the layer before has left: else memory grows with the depth
    (one,) = layer_inputs(call)
    if weighted is not None:
        weighted.add_inputs(call.layer, one)
    candidate = load_fit(run, call.layer, one)
    exact = call.output[0]
    change = torch.zeros_like(exact) if candidate is None else output(candidate, one) - exact
    piece: dict[str, Any] = run.checkpoint.get(f"deep-{name}-{call.layer}") or {}
    ceilings = piece.get("change")
    # bfloat16 halves the ceilings' pieces, and damage needs two digits.
    change = change[None].to(torch.bfloat16)
    return change if ceilings is None else torch.cat([change, ceilings.transpose(0, 1).to(change.device)])


def _walk(model: PreTrainedModel, tokens: Tensor, watch: Callable[[Call], Any]) -> None:
    body = body_of(model)
    with torch.no_grad(), capture(body, watch):
        forward(body, tokens)


def _title(name: str) -> str:
    return "stress passage" if name == STRESS else f"passage {name}"
