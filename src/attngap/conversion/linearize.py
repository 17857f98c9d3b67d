"""From a model to a converted model and its receipt: calibrate, fit, choose, fit jointly, save, measure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.card import model_card
from attngap.conversion.evaluate import Measures, measure
from attngap.conversion.options import ConversionOptions
from attngap.conversion.receipt import Receipt
from attngap.conversion.run import ConversionRun
from attngap.errors import AttngapError
from attngap.heads.forward import predicts_next
from attngap.heads.passages import check_tokenizer, longest
from attngap.heads.replacement import build_replacement, resolve_replacement
from attngap.models.mode import in_evaluation
from attngap.models.plan import Plan, Replacement, architecture
from attngap.models.positions import layer_positions
from attngap.models.products import quick_products
from attngap.models.save import (
    CARD,
    RECORD,
    Base,
    conversion_of,
    conversion_record,
    save,
    set_conversion,
)
from attngap.models.shapes import LayerShape, check_replaceable, layer_shapes
from attngap.storage.checkpoint import PIECES, Checkpoint, open_checkpoint
from attngap.storage.files import write_text
from attngap.storage.folder import check_output, publish

KIND = "converted model"
SAVING = "saving"  # the piece that says that the model in the folder is this run's


@in_evaluation
def linearize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan | None = None,
    text: str | Sequence[str] | None = None,
    *,
    options: ConversionOptions | None = None,
    measures: Measures | None = None,
    measured: bool = True,
    directory: str | Path | None = None,
    overwrite: bool = False,
    full: bool = False,
    name: str | None = None,
    ray: str | None = None,
    quiet: bool | None = None,
    **changes: Any,
) -> tuple[PreTrainedModel, Receipt]:
    """Replace the heads that do not need softmax; the converted model, which shares the original's weights.

    Options of `ConversionOptions` are given by name, such as `keep=0.1`, or as `options`. A plan says which heads are
    kept and what replaces the others, wherever options do not; without one a tenth of the heads is kept, those whose
    replacements do most damage. With a `directory` the model is saved there before it is measured, with the original
    beside it if `full`, and a killed run, started again with the same arguments, goes on where it stopped.
    `measured=False` leaves measuring to `attngap eval`. Layers are fitted side by side, or on the Ray cluster at `ray`.

    >>> converted, receipt = attngap.linearize(model, tokenizer, keep=0.1)  # doctest: +SKIP
    """
    options = effective((options or ConversionOptions()).but(**changes), plan)
    folder = None if directory is None else Path(directory)
    if folder is not None:
        check_output(folder, RECORD, KIND, overwrite=overwrite)
    _check_model(model, options)
    text = text if text is None or isinstance(text, str) else list(text)
    shapes = replaceable_layers(model)
    if plan is None:
        plan = Plan.for_model(model, name or _name(model), Replacement(), options.granularity)
    plan.check(model)
    check_tokenizer(model, tokenizer)
    _check_kept(plan, shapes)
    replacement, standalone = resolve_replacement(plan.replacement, options.mechanism, options.window, options.sinks)
    where = layer_positions(model)
    built = {
        shape.layer: build_replacement(
            shape, replacement, standalone, reach=options.context, positions=where[shape.layer]
        )
        for shape in shapes
    }
    threads = torch.get_num_threads() if ray is None else "ray"
    key = options.record() | {"plan": plan.model_dump_json(), "text": text, "threads": threads}
    with open_checkpoint(None if folder is None else folder / PIECES, key) as checkpoint:
        if folder is not None:
            _check_unfinished(folder, checkpoint, overwrite)
        mechanisms = {layer: mechanism for layer, (mechanism, _) in built.items()}
        with quick_products(model):
            run = ConversionRun(model, tokenizer, plan, text, options, mechanisms, checkpoint, quiet)
            kept = run.fit_and_choose(ray)
            run.share_windows(kept)
            converted = run.fit_jointly(kept)
            room = run.hold_tokens()
        # Where this model is: the plan may name it as it was seen from another folder, or on another machine.
        base = Base.of(model, str(model.config.name_or_path or ""))
        fixed = {(layer, head) for layer, head in plan.keep if layer not in built}
        final = plan.model_copy(update={"keep": tuple(sorted(kept | fixed)), "replacement": replacement})
        made = {i: o | room.get(i, {}) for i, (_, o) in built.items()}
        set_conversion(converted, conversion_record(converted, made, final, base, options.lora))
        receipt = run.receipt(kept)
        if folder is not None:
            checkpoint.put(SAVING, {})  # first: a model in the folder is from here on this run's own
            _save(folder, converted, tokenizer, model if full else None, receipt)
        if measured:
            with run.stage("measuring", 1):
                found = measure(model, converted, tokenizer, text, measures or Measures(), context=options.context)
            receipt = receipt.with_figures(found, seconds=run.seconds)
            if folder is not None:
                receipt.save(folder)
                write_text(folder / CARD, model_card(receipt, conversion_of(converted)))
    return converted, receipt


def effective(options: ConversionOptions, plan: Plan | None) -> ConversionOptions:
    """What is not given is the plan's; a mechanism that stands alone has neither window nor sinks."""
    planned: dict[str, Any] = {}
    if plan is not None:
        near = {"mechanism": plan.replacement.feature_map, "window": plan.replacement.window}
        planned = {"keep": None, "granularity": plan.granularity, **near, "sinks": plan.replacement.sinks}
    elif options.max_ppl_ratio is not None:
        planned = {"keep": None}
    found = options.but(**{name: value for name, value in planned.items() if name not in options.model_fields_set})
    return found if found.window else found.but(sinks=0)


def replaceable_layers(model: PreTrainedModel) -> list[LayerShape]:
    """The layers that can be replaced; a model without any is refused, with the reason."""
    shapes = layer_shapes(model)
    check_replaceable(model, shapes)
    return [shape for shape in shapes if shape.obstacle is None]


def _save(
    folder: Path,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    original: PreTrainedModel | None,
    receipt: Receipt,
) -> None:
    with publish(folder, RECORD) as draft:
        card = model_card(receipt, conversion_of(converted))
        save(converted, draft, tokenizer=tokenizer, original=original, card=card, place=folder)
        receipt.save(draft)


def _check_unfinished(folder: Path, checkpoint: Checkpoint, overwrite: bool) -> None:
    """Pieces of a killed run let it go on; a model there must be that run's own, or may be overwritten."""
    if (folder / RECORD).exists() and not overwrite and not checkpoint.has(SAVING):
        checkpoint.clear_if_empty()
        raise AttngapError(f"'{folder}' already holds a {KIND}. Choose another folder, or pass --overwrite")


def _name(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path or architecture(model))


def _check_model(model: PreTrainedModel, options: ConversionOptions) -> None:
    limit = longest(model)
    if limit is not None and options.context > limit:
        raise AttngapError(f"context {options.context} is beyond the model's {limit} positions. Give at most {limit}")
    held = options.max_ppl_length
    if limit is not None and held is not None and held > limit:
        raise AttngapError(f"max_ppl_length {held} is beyond the model's {limit} positions. Give at most {limit}")
    if options.max_ppl_ratio is not None and not predicts_next(model):
        raise AttngapError("max_ppl_ratio needs a language model; an encoder has no perplexity. Give keep or a plan")


def _check_kept(plan: Plan, shapes: list[LayerShape]) -> None:
    """A head that cannot be replaced must be kept by the plan."""
    able = {shape.layer for shape in shapes}
    for layer, head in plan.replaced():
        if layer not in able:
            raise AttngapError(
                f"The plan replaces head {layer}.{head}, but that layer stays softmax: it has a sliding window or a "
                "position bias, shares its keys, or is not there. Keep its heads"
            )
