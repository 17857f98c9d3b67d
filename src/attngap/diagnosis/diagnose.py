"""Which heads of a model need softmax, why, and how much of the gap no linear attention could close."""

import contextlib
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.diagnosis import assemble
from attngap.diagnosis.joint import RECALL_PASSAGES, TEXT_PASSAGES, can_measure, measure_together, measure_worst
from attngap.diagnosis.options import MAX_TOKENS, DiagnosisOptions
from attngap.diagnosis.result import RESULT, Diagnosis
from attngap.diagnosis.run import DiagnosisRun, Shape, shape_of
from attngap.diagnosis.stages import estimate_damage, take_floors_and_fits, take_statistics
from attngap.diagnosis.tasks import check_sendable
from attngap.diagnosis.verdicts import set_verdicts
from attngap.diagnosis.verify import verify as measure_damage
from attngap.engine.cluster import Cluster
from attngap.errors import AttngapError
from attngap.heads.passages import PERIOD, check_tokenizer, longest, stress
from attngap.heads.passages import passages as cut
from attngap.models.mode import in_evaluation
from attngap.models.placement import device_of, has_weights_elsewhere
from attngap.models.plan import ModelFacts, architecture, fingerprint
from attngap.models.products import quick_products
from attngap.options import KEEP
from attngap.provenance import provenance
from attngap.storage.checkpoint import PIECES, open_checkpoint
from attngap.storage.folder import check_output, publish

# Additional passages for damage, as many of these as the text has room for; as long as the others, for what lies far
# grows with the length, and so does damage.
MORE = (4, 2, 1)
VERIFY_PASSAGES = 2
SHARED = 32  # tokens in a row that only passages with text in common share


@in_evaluation
def diagnose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str] | None = None,
    *,
    options: DiagnosisOptions | None = None,
    directory: str | Path | None = None,
    overwrite: bool = False,
    name: str | None = None,
    ray: str | None = None,
    quiet: bool | None = None,
    **changes: Any,
) -> Diagnosis:
    """Diagnose every head of `model` on some passages of `text` and on a stress passage of repeated random tokens.

    Options of `DiagnosisOptions` are given by name, such as `context=2048`, or as `options`. `quick` takes statistics
    only, and no `ranks` leave out floors and ceilings. Floors, ceilings, fits and damage look at the first 1024 tokens
    of each passage. `verify` replaces that many heads for real, on held-out passages. With a `directory` the result is
    saved there and a killed run, started again with the same arguments, goes on where it stopped. With `ray`, the
    address of a cluster, passages and layers are looked at there, by one thread each, and the result is the same.

    >>> found = attngap.diagnose(model, tokenizer, quick=True)  # doctest: +SKIP
    """
    options = (options or DiagnosisOptions()).but(**changes)
    folder = None if directory is None else Path(directory)
    if folder is not None:
        check_output(folder, RESULT, "diagnosis", overwrite=overwrite)
    check_tokenizer(model, tokenizer)
    _check_context(model, options.context)
    if ray is not None:
        check_sendable(device_of(model), on_disk=has_weights_elsewhere(model))
    context, seed = options.context, options.seed
    calibration = cut(tokenizer, text, context=context, count=options.passages, seed=seed)
    held_out = _held_out(tokenizer, text, context, seed) if options.verify else None
    stress, period = _stress(tokenizer, context, options.window, seed)
    shape = shape_of(model, calibration[:1])
    limit = min(context, MAX_TOKENS)
    more = _more(tokenizer, text, limit, seed)
    facts = ModelFacts(
        name=str(name or model.config.name_or_path or architecture(model)),
        architecture=architecture(model),
        fingerprint=fingerprint(model),
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )
    key = options.but(verify=0).record() | {"model": facts.fingerprint, "tokens": _digest(calibration, stress)}
    pieces = None if folder is None else folder / PIECES
    with open_checkpoint(pieces, key) as checkpoint, _cluster(ray) as cluster, quick_products(model):
        run = DiagnosisRun(
            model=model,
            shape=shape,
            options=options,
            text=calibration,
            more=more,
            fresh=_fresh(tokenizer, text, limit, seed, [*calibration.split(1), *more]),
            fresh_stress=[_stress(tokenizer, limit, options.window, seed + 3 + i)[0] for i in range(RECALL_PASSAGES)],
            stress=stress,
            period=period,
            fit_repeats=_fit_repeats(tokenizer, min(context, MAX_TOKENS), seed),
            checkpoint=checkpoint,
            quiet=quiet,
            cluster=cluster,
        )
        seconds = _run_stages(run)
        result = _assemble(run, tokenizer, facts, seconds)
        if held_out is not None:
            other, _ = _stress(tokenizer, context, options.window, seed + 1)
            result.verification = measure_damage(run, result.heads, held_out, other, options.verify)
        if folder is not None:
            with publish(folder, RESULT) as draft:
                result.save(draft)
    return result


def _cluster(ray: str | None) -> contextlib.AbstractContextManager[Cluster | None]:
    return contextlib.nullcontext() if ray is None else Cluster(ray)


def _digest(*tokens: Tensor) -> str:
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in tokens)).hexdigest()


def _run_stages(run: DiagnosisRun) -> dict[str, float]:
    seconds = {}
    stages = {"statistics": take_statistics}
    if not run.options.quick:
        stages |= {"floors and fits": take_floors_and_fits, "damage": estimate_damage}
    for title, stage in stages.items():
        start = time.monotonic()
        stage(run)
        seconds[title] = round(time.monotonic() - start, 2)
    return seconds


def _assemble(run: DiagnosisRun, tokenizer, facts: ModelFacts, seconds: dict[str, float]) -> Diagnosis:
    options, deep = run.options, not run.options.quick
    rank = headline_rank(options.ranks, run.shape) if deep and options.ranks else None
    heads = assemble.heads(run, tokenizer, rank, deep=deep)
    start, replace = time.monotonic(), deep and can_measure(run, heads)
    if replace:
        measure_worst(run, heads)
    set_verdicts(heads, KEEP, rank, "nats" if run.shape.is_language_model else "of squared embedding change")
    result = Diagnosis(
        model=facts,
        options=options.record(),
        rank=rank,
        replacement=run.replacement,
        damage_unit=_unit(run.shape) if deep else None,
        heads=heads,
        cross=assemble.cross_rows(run),
        notes=_notes(run),
        seconds=seconds,
        provenance=provenance(seed=options.seed, model=facts.name),
    )
    if replace:
        result.joint = measure_together(run, result)
        result.seconds["replacements"] = round(time.monotonic() - start, 2)
    return result.with_pictures(assemble.patterns(run)) if deep else result


def headline_rank(ranks: Sequence[int], shape: Shape) -> int:
    """The rank nearest to the head's own dimension: the state a linear attention of the same size would have."""
    return min(ranks, key=lambda rank: (abs(rank - shape.head_dim), rank))


def _unit(shape: Shape) -> str:
    if shape.is_language_model:
        return "nats a token: KL divergence to second order, labels drawn from the model"
    return "squared change of the normalized mean-pooled embedding (an encoder has no labels)"


def _notes(run: DiagnosisRun) -> list[str]:
    options = run.options
    notes = ["n_star extrapolates: it holds if longer contexts bring competitors like the present ones"]
    if run.shape.linear:
        notes.append(f"{run.shape.linear} heads are linear already: their statistics are of the weights they have now")
        if options.context > MAX_TOKENS:
            notes.append(f"statistics of a converted model look at the first {MAX_TOKENS} tokens of each passage")
    if options.quick:
        return [*notes, "quick: no floors, fits or damage; verdicts go by statistics alone"]
    if run.more:
        notes.append(f"damage was estimated on {len(run.more)} more passages of {run.more[0].shape[1]} tokens as well")
    if not run.fresh:
        notes.append("the text has no passage left that no score has seen: plans predict nothing")
    if options.context > MAX_TOKENS:
        notes.append(f"floors, fits and damage look at the first {MAX_TOKENS} tokens of each passage")
    if not options.ranks:
        return [*notes, "no ranks were asked for: no floors and no ceilings, and damage is not split"]
    cuts, possible = assemble.coarsening(run)
    if run.shape.causal:
        notes.append(
            f"floors tried {cuts} of {possible} cuts: they are certified, a finer search could only raise them"
        )
    else:
        notes.append(
            "bidirectional attention: floors are Eckart-Young on the whole matrix, window and sinks do not apply"
        )
    notes.append("unavoidable is the damage of the best weights constructed at that rank: an estimate, not a bound")
    notes.append("floors, ceilings and the unavoidable share are from the first passage, all else from every passage")
    return notes


def _more(tokenizer, text, context: int, seed: int) -> list[Tensor]:
    for count in MORE:
        with contextlib.suppress(AttngapError):
            return list(cut(tokenizer, text, context=context, count=count, seed=seed + 1).split(1))
    return []


def _fresh(tokenizer, text, context: int, seed: int, used: list[Tensor]) -> list[Tensor]:
    """Passages of the calibration text that have no text in common with those used, as many as there is room for."""
    for count in range(TEXT_PASSAGES + len(used), 0, -1):
        with contextlib.suppress(AttngapError):
            found = cut(tokenizer, text, context=context, count=count, seed=seed + 2)
            return [row for row in found.split(1) if not any(_share(row[0], each[0]) for each in used)][:TEXT_PASSAGES]
    return []


def _share(a: Tensor, b: Tensor) -> bool:
    size = min(SHARED, len(a), len(b))
    runs = {tuple(each) for each in a.unfold(0, size, 1).tolist()}
    return any(tuple(each) in runs for each in b.unfold(0, size, 1).tolist())


def _stress(tokenizer, context: int, window: int, seed: int) -> tuple[Tensor, int]:
    """Repeated from beyond the window where the context has room for that: nearer, every replacement recalls it."""
    return stress(tokenizer, context=context, seed=seed, period=max(PERIOD, 2 * window))


def _fit_repeats(tokenizer, length: int, seed: int) -> Tensor:
    """Random tokens twice, as long as the text; an odd length loses the last of the second copy."""
    return stress(tokenizer, context=length + 1, seed=seed + 2, period=length)[0][:, :length]


def _held_out(tokenizer, text, context: int, seed: int):
    size = min(context, MAX_TOKENS)
    return cut(tokenizer, text, context=size, count=VERIFY_PASSAGES, seed=seed, split="heldout")


def _check_context(model: PreTrainedModel, context: int) -> None:
    limit = longest(model)
    if limit is not None and context > limit:
        raise AttngapError(
            f"context {context} is beyond the model's {limit} positions. Give a context of at most {limit}"
        )
