"""The passes over the model. Each leaves its pieces in the work folder and skips those that are there already."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from attngap.diagnosis.layers import examine, fit, monotonicity, untrained_errors
from attngap.diagnosis.linear import with_mixing
from attngap.diagnosis.options import MAX_TOKENS, DiagnosisOptions
from attngap.diagnosis.survey import survey
from attngap.diagnosis.weighted import ReadWeights
from attngap.errors import AttngapError
from attngap.heads.damage import label_directions, projections, random_directions
from attngap.heads.forward import body_of, embedding, forward, is_language_model
from attngap.heads.inputs import LayerInputs, layer_inputs
from attngap.heads.replacement import build_replacement, output, relative_error
from attngap.models.capture import Call, capture
from attngap.models.mode import tokens_suffice
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes
from attngap.progress import progress
from attngap.storage.checkpoint import Checkpoint

STRESS = "stress"
STRESS_DRAWS = 4  # there is one stress passage and many of text
EMBEDDING_DRAWS = 16  # a passage has one embedding but a label at every token: one direction of it says too little


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model, as one short forward pass shows them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    cross: int  # cross-attention calls
    causal: bool
    is_language_model: bool  # predicts tokens, so damage is a KL divergence; else it is a change of embedding
    linear: int  # heads that an earlier conversion replaced
    obstacles: tuple[str | None, ...]  # why the heads of each layer cannot be replaced


@dataclasses.dataclass(frozen=True)
class DiagnosisRun:
    """One diagnosis under way: the model, its passages, the options, and where pieces go."""

    model: PreTrainedModel
    shape: Shape
    options: DiagnosisOptions
    text: Int[Tensor, "p t"]
    more: list[Int[Tensor, "1 t"]]  # passages for damage only: it varies more with the text than with the labels
    fresh: list[Int[Tensor, "1 t"]]  # text and repeated tokens that no score sees: heads are replaced for real on them
    fresh_stress: list[Int[Tensor, "1 t"]]
    stress: Int[Tensor, "1 t"]
    period: int
    fit_repeats: Int[Tensor, "1 t"]  # other repeated random tokens, for fits only: without any they know text alone
    checkpoint: Checkpoint
    quiet: bool | None

    @property
    def replacement(self) -> Replacement:
        """What would stand in for a head."""
        return Replacement(window=self.options.window, sinks=self.options.sinks)

    def passages(self) -> list[tuple[str, Tensor]]:
        """Every passage by name, the stress passage last."""
        return [(str(i), row[None]) for i, row in enumerate(self.text)] + [(STRESS, self.stress)]

    def damaged(self) -> list[tuple[str, Tensor]]:
        """Passages that damage is estimated on."""
        return self.passages() + [(f"more-{i}", tokens) for i, tokens in enumerate(self.more)]


def shape_of(model: PreTrainedModel, tokens: Int[Tensor, "1 t"]) -> Shape:
    """Look at a few tokens: how many layers and heads there are, and whether the model can be watched at all."""
    seen: list[Call] = []
    with tokens_suffice(model), torch.no_grad(), capture(model, lambda call: seen.append(call)):
        forward(model, tokens[:, :8])
    own = [call for call in seen if not call.cross]
    if not own:
        raise AttngapError(f"{type(model).__name__} has no softmax attention: there is no head to look at")
    sizes = {(call.heads, call.kv_heads, call.q.shape[-1]) for call in own}
    if len(sizes) != 1:
        raise AttngapError(
            f"{type(model).__name__} has layers with different heads (heads, key heads, dim): {sorted(sizes)}; "
            "only models whose layers are alike are supported"
        )
    heads, kv_heads, dim = sizes.pop()
    obstacles = [shape.obstacle for shape in layer_shapes(model)]
    layer_positions(model)  # noted for the fits: their features shall be those of a conversion
    return Shape(
        layers=len(own),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        cross=len(seen) - len(own),
        causal=all(call.causal for call in own),
        is_language_model=is_language_model(model),
        linear=sum(len(call.linear) for call in own),
        # Of a layer that was converted before, the kept heads still show what they would cost.
        obstacles=tuple(
            None if 0 < len(call.linear) < call.heads else why for call, why in zip(own, obstacles, strict=True)
        ),
    )


def take_statistics(run: DiagnosisRun) -> None:
    """One forward pass per passage; every row of every head, no n x n matrix but of heads that are linear already."""
    near = run.options
    for name, tokens in run.passages():
        names = [f"rows-{name}-{layer}" for layer in range(run.shape.layers)]
        names += [f"cross-{name}-{layer}" for layer in range(run.shape.cross)]
        if all(map(run.checkpoint.has, names)):
            continue
        with progress(f"statistics, {_title(name)}", len(names), quiet=run.quiet) as advance:

            def watch(call: Call, name: str = name, advance: Callable[..., None] = advance) -> None:
                piece = f"{'cross' if call.cross else 'rows'}-{name}-{call.layer}"
                if not run.checkpoint.has(piece):
                    period = run.period if name == STRESS and not call.cross else None
                    one = with_mixing(next(layer_inputs(call)), call)
                    run.checkpoint.put(piece, survey(one, window=near.window, sinks=near.sinks, period=period))
                advance(note=f"layer {call.layer}")

            _walk(run.model, tokens[:, :MAX_TOKENS] if run.shape.linear else tokens, watch)


def take_floors_and_fits(run: DiagnosisRun) -> None:
    """Floors, ceilings, untrained errors and fits, a layer at a time while the model runs: first text, then stress."""
    text = torch.cat([run.fit_repeats, run.text[:, :MAX_TOKENS]])
    layers = range(run.shape.layers)
    title = "floors and fits" if run.options.ranks else "fits"
    if not all(_deep(run, "0", layer) for layer in layers):
        with progress(f"{title}, text", run.shape.layers, quiet=run.quiet) as advance:
            _walk(run.model, text, lambda call: _text_layer(run, call, advance))
    if not all(_deep(run, STRESS, layer) for layer in layers):
        with progress(f"{title}, stress passage", run.shape.layers, quiet=run.quiet) as advance:
            _walk(run.model, run.stress, lambda call: _stress_layer(run, call, advance))


def _deep(run: DiagnosisRun, name: str, layer: int) -> bool:
    return run.checkpoint.has(f"deep-{name}-{layer}")


def _text_layer(run: DiagnosisRun, call: Call, advance: Callable[..., None]) -> None:
    if call.cross:
        return
    if not run.checkpoint.has(f"fit-{call.layer}"):
        advance(0, note=f"layer {call.layer}: fitting")
        batch = list(layer_inputs(call))
        weights = fit(batch, call.output, run.replacement).state_dict() if batch[0].replaceable else {}
        run.checkpoint.put(f"fit-{call.layer}", weights)
    advance(0, note=f"layer {call.layer}: {'floors' if run.options.ranks else 'errors'}")
    _examine(run, "0", call, first=1)
    advance(note=f"layer {call.layer}")


def _stress_layer(run: DiagnosisRun, call: Call, advance: Callable[..., None]) -> None:
    if call.cross:
        return
    _examine(run, STRESS, call, first=0)
    advance(note=f"layer {call.layer}")


def _examine(run: DiagnosisRun, name: str, call: Call, first: int) -> None:
    """Certificates of the batch's `first` passage; errors of the fit on that and all later ones."""
    if _deep(run, name, call.layer):
        return
    batch, exact = list(layer_inputs(call))[first:], call.output[first:]
    one, candidate = with_mixing(batch[0], call, first), load_fit(run, call.layer, batch[0])
    found = examine(one, exact[0], run.options.ranks, run.replacement)
    if candidate is not None:
        found |= untrained_errors(one, exact[0], run.replacement)
        errors = [relative_error(output(candidate, one), out) for one, out in zip(batch, exact, strict=True)]
        found["fit"] = torch.stack(errors).mean(0)
        found["monotonicity"] = monotonicity(candidate, batch[0])
    run.checkpoint.put(f"deep-{name}-{call.layer}", found)


def load_fit(run: DiagnosisRun, layer: int, one: LayerInputs):
    """The layer's fitted replacement from its piece; None where nothing can be fitted."""
    if not one.replaceable:
        return None
    candidate, _ = build_replacement(one, run.replacement, positions=one.positions)
    candidate.load_state_dict(run.checkpoint.require(f"fit-{layer}"))
    return candidate.requires_grad_(False)


def estimate_damage(run: DiagnosisRun) -> None:
    """Backward passes on every passage; the ceiling's change is known on the first text passage and on stress."""
    passages = run.damaged()
    if all(run.checkpoint.has(f"damage-{name}") for name, _ in passages):
        return
    with progress("damage, backward passes", len(passages), quiet=run.quiet) as advance:
        for number, (name, tokens) in enumerate(passages):
            if not run.checkpoint.has(f"damage-{name}"):
                advance(0, note=_title(name))
                run.checkpoint.put(f"damage-{name}", _damage(run, name, tokens, run.options.seed + number))
            advance(note=_title(name))


def _damage(run: DiagnosisRun, name: str, tokens: Tensor, seed: int) -> dict[str, Tensor]:
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
    return pieces


def _changes(run: DiagnosisRun, name: str, call: Call, weighted: ReadWeights | None) -> Tensor:
    """(1 + ranks, h, t, dv): the fitted replacement's change of the output, then the ceiling's for each rank."""
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
