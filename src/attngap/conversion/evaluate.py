"""Measure a converted model beside its original and two baselines, in one run."""

import contextlib
import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.by_length import AtLength, at_length
from attngap.conversion.quality import Quality, on_text, recall
from attngap.conversion.receipt import (
    CONVERTED,
    ORIGINAL,
    RANDOM,
    WINDOW,
    WITHOUT,
    WITHOUT_HELD,
    WITHOUT_WINDOW,
    Figures,
    Receipt,
    unmeasured_receipt,
)
from attngap.conversion.speed import Speed, speeds
from attngap.errors import AttngapError
from attngap.heads.forward import predicts_next
from attngap.heads.passages import passages
from attngap.heads.replacement import window_only
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.calls import far_parts_by
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.mixed import MixedHeads, mixed_heads
from attngap.models.placement import device_of
from attngap.models.products import quick_products
from attngap.models.save import conversion_of, weights_hash
from attngap.models.swap import swap
from attngap.provenance import provenance

SHORTEST = 1024  # tokens at which parts are measured: text, facts and questions take half of that
NEAR_LENGTH = 2048  # the form without a window is measured up to here: it is of no use at any length


@dataclasses.dataclass(frozen=True)
class Measures:
    """What to measure; zero or empty leaves a part out."""

    passages: int = 3  # of held-out text
    trials: int = 1  # of induction, and of a needle at each place
    lengths: tuple[int, ...] = (1024,)  # of needle passages
    by_length: tuple[int, ...] = (1024, 4096, 8192)  # at which every part is measured, up to the model's own positions
    contexts: tuple[int, ...] = (1024, 4096, 8192, 16384)  # for speed and memory
    prefill_up_to: int = 1024  # longer prompts take minutes on a CPU
    baselines: bool = True
    repetition: bool = False  # a repeated sequence at each of `by_length`, as long to read again as the text
    text: str | list[str] | None = None  # to evaluate on; None: the held-out part of the calibration text
    seed: int = 1


def evaluate(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str] | None = None,
    *,
    lengths: Sequence[int] = Measures.lengths,
    contexts: Sequence[int] = Measures.contexts,
    measures: Measures | None = None,
) -> Receipt:
    """Measure a converted model beside its original and two baselines; a receipt that is not written anywhere.

    Text is read in passages of the longest of `lengths`, and a needle is hidden in passages of each of them; `contexts`
    are those of speed and memory, empty for none. `measures` says the rest: how many passages and trials, and whether
    baselines are measured. Without `text`, what calibration holds out of the default text is used.

    >>> receipt = attngap.evaluate(model, converted, tokenizer, lengths=(1024, 4096))  # doctest: +SKIP
    """
    conversion = conversion_of(converted)
    if weights_hash(original) != conversion.base.sha256:
        raise AttngapError(
            "evaluate: the original is not the model that this one was converted from, "
            f"{conversion.base.name or conversion.plan.model.name!r}. Load that one: attngap.load"
        )
    if not lengths:
        raise AttngapError("evaluate: lengths needs at least one length, such as (1024, 4096)")
    chosen = dataclasses.replace(
        measures or Measures(),
        lengths=tuple(lengths),
        by_length=tuple(lengths),
        contexts=tuple(contexts),
        text=text if text is None or isinstance(text, str) else list(text),
    )
    receipt = unmeasured_receipt(conversion)
    made = provenance(seed=chosen.seed, model=receipt.model, far_part=far_part_of(converted))
    figures = measure(original, converted, tokenizer, None, chosen, context=max(lengths))
    options = receipt.options | {"context": max(lengths)}  # of the passages that were read here
    return receipt.model_copy(update={"provenance": made, "options": options}).with_figures(figures)


def far_part_of(converted: PreTrainedModel) -> str | None:
    """What computes the far part of its replaced heads, for the receipt."""
    return far_parts_by((part.mechanism for part in mixed_heads(converted).values()), device_of(converted))


def measure(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    measures: Measures,
    *,
    context: int,
) -> Figures:
    """Quality of the original, the converted model and the baselines; speed of the first two, the original as it is.

    A part that fails is left out and noted: what was fitted for an hour must not be lost to a figure about it.
    """
    pair, notes = {ORIGINAL: original, CONVERTED: converted}, []
    quality: dict[str, Quality] = {}
    speed: dict[str, list[Speed]] = {}
    with quick_products(original), _noting("quality", notes):
        models = pair | (baselines(original, converted, seed=measures.seed) if measures.baselines else {})
        tokens = _passages(tokenizer, text, measures, context)
        quality = on_text(models, tokens, is_language_model=predicts_next(original))
        if predicts_next(original) and measures.trials:
            with _noting("recall", notes):
                _recall(models, tokenizer, text, quality, measures, context)
    parts = parts_of(original, converted, baselines=measures.baselines)
    rows: list[AtLength] = []
    for length in _reachable(original, measures.by_length) if predicts_next(original) else ():
        with quick_products(original), _noting(f"quality at {length:,} tokens", notes):
            read = text if measures.text is None else measures.text
            measured = {name: model for name, model in parts.items() if name != WITHOUT_WINDOW or length <= NEAR_LENGTH}
            rows += at_length(measured, tokenizer, read, length, repetition=measures.repetition)
    if predicts_next(original):
        with _noting("speed", notes):
            speed = speeds(pair, measures.contexts, prefill_up_to=measures.prefill_up_to)
    return Figures(quality, speed, notes, rows)


def parts_of(original: PreTrainedModel, converted: PreTrainedModel, *, baselines: bool) -> dict[str, PreTrainedModel]:
    """What is measured at each length: original and converted, and the latter without one of its parts."""
    found = {ORIGINAL: original, CONVERTED: converted}
    near = _hybrids(converted)
    if baselines and near:
        found[WITHOUT] = _with_parts(original, converted, {i: _without_features(m) for i, m in near.items()})
        if any(m.held for m in near.values()):
            last = {i: m.with_window(m.room) for i, m in near.items()}
            found[WITHOUT_HELD] = _with_parts(original, converted, last)
        found[WITHOUT_WINDOW] = _with_parts(original, converted, {i: _without_window(m) for i, m in near.items()})
    return found


def _hybrids(converted: PreTrainedModel) -> dict[int, Hybrid]:
    """The replacements by layer where all of them have a window; else none."""
    parts = {layer: part.mechanism for layer, part in mixed_heads(converted).items()}
    found = {layer: m for layer, m in parts.items() if isinstance(m, Hybrid)}
    return found if len(found) == len(parts) else {}


def _with_parts(
    original: PreTrainedModel, converted: PreTrainedModel, mechanisms: Mapping[int, Mechanism]
) -> PreTrainedModel:
    """The same heads replaced by others."""
    parts = mixed_heads(converted)
    return swap(original, {layer: (m, parts[layer].keep.tolist()) for layer, m in mechanisms.items()})


def _without_features(m: Hybrid) -> Mechanism:
    """The last tokens alone, as many as there is room for."""
    return window_only(m, m.room, m.sinks, relative=m.relative)


def _without_window(m: Hybrid) -> Mechanism:
    """Features read every key but the sinks and the token itself."""
    return m.with_window(1)


def _reachable(model: PreTrainedModel, lengths: Iterable[int]) -> list[int]:
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return [length for length in lengths if length >= SHORTEST and (own is None or length <= own)]


@contextlib.contextmanager
def _noting(what: str, notes: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any kind: the model may do anything that its authors did not think of
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        notes.append(f"{what} could not be measured: {first}")


def _passages(
    tokenizer: PreTrainedTokenizerBase, text: str | list[str] | None, measures: Measures, context: int
) -> Int[Tensor, "count context"]:
    """Held-out passages of the calibration text, or passages of a text of their own."""
    if measures.text is None:
        return passages(tokenizer, text, context=context, count=measures.passages, split="heldout")
    return passages(tokenizer, measures.text, context=context, count=measures.passages, seed=measures.seed)


def _recall(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    quality: dict[str, Quality],
    measures: Measures,
    context: int,
) -> None:
    lengths = [length for length in measures.lengths if length <= context] or [context]
    sizes = {"context": context, "lengths": lengths, "trials": measures.trials, "seed": measures.seed}
    recall(models, tokenizer, text, quality, **sizes)


def baselines(original: PreTrainedModel, converted: PreTrainedModel, *, seed: int) -> dict[str, PreTrainedModel]:
    """The same heads with sinks and window only; and the same replacements with as many heads kept at random."""
    parts, near = mixed_heads(converted), _hybrids(converted)
    found = {}
    if near:
        found[WINDOW] = _with_parts(original, converted, {i: _without_features(m) for i, m in near.items()})
    kept = sum(len(part.keep) for part in parts.values())
    if kept:
        found[RANDOM] = swap(original, _random_heads(parts.values(), kept, seed))
    return found


def _random_heads(parts: Iterable[MixedHeads], kept: int, seed: int) -> dict[int, tuple]:
    parts = list(parts)
    every = [(part.layer, head) for part in parts for head in range(part.mechanism.heads)]
    chosen = set(random.Random(seed).sample(every, kept))
    return {
        part.layer: (part.mechanism, [h for h in range(part.mechanism.heads) if (part.layer, h) in chosen])
        for part in parts
    }
