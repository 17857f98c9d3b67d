"""Which heads of a model need softmax, why, and how much of the gap no linear attention could close."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.diagnosis import assemble
from attngap.diagnosis.layers import Depth
from attngap.diagnosis.result import RESULT, Diagnosis
from attngap.diagnosis.stages import DEPTH, Job, Shape, estimate_damage, look_deep, shape_of, take_statistics
from attngap.diagnosis.verdicts import judge
from attngap.diagnosis.verify import verify as measure_damage
from attngap.errors import AttngapError
from attngap.heads.passages import PERIOD, stress
from attngap.heads.passages import passages as cut
from attngap.models.plan import ModelFacts, Replacement, architecture, fingerprint
from attngap.provenance import provenance
from attngap.storage.checkpoint import PIECES, claimed, open_checkpoint

KEEP = 0.1  # the share of heads that verdicts keep; a plan may keep another
MORE = (8, 4, 2, 1)  # additional, shorter passages for damage: as many of these as the text has room for
MORE_CONTEXT = 512
VERIFY_PASSAGES = 4
VERIFY_CONTEXT = 512


def diagnose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str] | None = None,
    *,
    context: int = 1024,
    passages: int = 4,
    ranks: Sequence[int] = (8, 16, 64, 128),
    window: int = 64,
    sinks: int = 4,
    quick: bool = False,
    verify: int = 0,
    seed: int = 0,
    draws: int = 1,
    directory: str | Path | None = None,
    overwrite: bool = False,
    name: str | None = None,
    quiet: bool | None = None,
) -> Diagnosis:
    """Diagnose every head of `model` on `passages` passages of `context` tokens of `text` and on a stress passage.

    `quick` takes statistics only, and no `ranks` leave out floors and ceilings. Floors, ceilings, fits and damage look
    at the first 1024 tokens of each passage.
    `verify` replaces that many heads for real, on held-out passages. With a `directory` the result is saved there and
    a killed run, started again with the same arguments, goes on where it stopped.
    """
    name = str(name or model.config.name_or_path or architecture(model))
    _check(model, context, passages, ranks, window, sinks, draws, verify, quick)
    calibration = cut(tokenizer, text, context=context, count=passages, seed=seed)
    held_out = _held_out(tokenizer, text, context, seed) if verify else None
    more = _more(tokenizer, text, min(context, MORE_CONTEXT), seed)
    repeated, period = _stress(tokenizer, context, window, seed)
    rehearsal = _rehearsal(tokenizer, min(context, DEPTH), seed)
    shape = shape_of(model, calibration[:1])
    facts = ModelFacts(
        name=name,
        architecture=architecture(model),
        fingerprint=fingerprint(model),
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )
    options = {
        "context": context,
        "passages": passages,
        "ranks": list(ranks),
        "window": window,
        "sinks": sinks,
        "quick": quick,
        "seed": seed,
        "draws": draws,
    }
    key = options | {"model": facts.fingerprint, "tokens": int(calibration.sum()) + int(repeated.sum())}
    replacement = Replacement(window=window, sinks=sinks)
    with open_checkpoint(_pieces(directory, overwrite), key) as checkpoint:
        depth = Depth(tuple(ranks), replacement)
        job = Job(model, shape, calibration, more, repeated, period, rehearsal, depth, draws, seed, checkpoint, quiet)
        seconds = _stages(job, quick)
        result = _assemble(job, tokenizer, facts, options | {"verify": verify}, seconds)
        if held_out is not None:
            other, _ = _stress(tokenizer, context, window, seed + 1)
            result.verification = measure_damage(job, result.heads, held_out, other, verify)
        if directory is not None:
            result.save(directory)
    return result


def _stages(job: Job, quick: bool) -> dict[str, float]:
    seconds = {}
    stages = {"statistics": take_statistics}
    if not quick:
        stages |= {"floors and fits": look_deep, "damage": estimate_damage}
    for title, stage in stages.items():
        start = time.monotonic()
        stage(job)
        seconds[title] = round(time.monotonic() - start, 2)
    return seconds


def _assemble(job: Job, tokenizer, facts: ModelFacts, options: dict, seconds: dict[str, float]) -> Diagnosis:
    deep = not options["quick"]
    rank = headline_rank(job.depth.ranks, job.shape) if deep and job.depth.ranks else None
    heads = assemble.heads(job, tokenizer, rank, deep=deep)
    judge(heads, KEEP, rank, "nats" if job.shape.is_language_model else "of squared embedding change")
    result = Diagnosis(
        model=facts,
        options=options,
        rank=rank,
        replacement=job.depth.replacement,
        damage_unit=_unit(job.shape) if deep else None,
        heads=heads,
        cross=assemble.cross_rows(job),
        notes=_notes(job, options),
        seconds=seconds,
        provenance=provenance(seed=options["seed"], model=facts.name),
    )
    return result.with_pictures(assemble.patterns(job)) if deep else result


def headline_rank(ranks: Sequence[int], shape: Shape) -> int:
    """The rank nearest to the head's own dimension: the state a linear attention of the same size would have."""
    return min(ranks, key=lambda rank: (abs(rank - shape.head_dim), rank))


def _unit(shape: Shape) -> str:
    if shape.is_language_model:
        return "nats a token: KL divergence to second order, labels drawn from the model"
    return "squared change of the normalized mean-pooled embedding (an encoder has no labels)"


def _notes(job: Job, options: dict) -> list[str]:
    notes = ["n_star extrapolates: it holds if longer contexts bring competitors like the present ones"]
    if job.shape.linear:
        notes.append(f"{job.shape.linear} heads are linear already: their statistics are of the weights they have now")
        if options["context"] > DEPTH:
            notes.append(f"statistics of a converted model look at the first {DEPTH} tokens of each passage")
    if options["quick"]:
        return [*notes, "quick: no floors, fits or damage; verdicts go by statistics alone"]
    if job.more:
        notes.append(f"damage was estimated on {len(job.more)} more passages of {job.more[0].shape[1]} tokens as well")
    if options["context"] > DEPTH:
        notes.append(f"floors, fits and damage look at the first {DEPTH} tokens of each passage")
    if not job.depth.ranks:
        return [*notes, "no ranks were asked for: no floors and no ceilings, and damage is not split"]
    cuts, possible = assemble.coarsening(job)
    if job.shape.causal:
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


def _stress(tokenizer, context: int, window: int, seed: int) -> tuple[Tensor, int]:
    """Repeated from beyond the window where the context has room for that: nearer, every replacement recalls it."""
    return stress(tokenizer, context=context, seed=seed, period=max(PERIOD, 2 * window))


def _rehearsal(tokenizer, length: int, seed: int) -> Tensor:
    """Random tokens twice, as long as the text; an odd length loses the last of the second copy."""
    return stress(tokenizer, context=length + 1, seed=seed + 2, period=length)[0][:, :length]


def _held_out(tokenizer, text, context: int, seed: int):
    size = min(context, VERIFY_CONTEXT)
    return cut(tokenizer, text, context=size, count=VERIFY_PASSAGES, seed=seed, split="heldout")


def _pieces(directory: str | Path | None, overwrite: bool) -> Path | None:
    """Where pieces of the run go; a folder that holds anything but a diagnosis of ours is refused."""
    if directory is None:
        return None
    folder, pieces = Path(directory), Path(directory) / PIECES
    if (folder / RESULT).exists() and not overwrite:
        raise AttngapError(f"'{folder}' already holds a diagnosis. Choose another folder, or pass --overwrite")
    if folder.is_dir() and any(folder.iterdir()) and not (claimed(pieces) or (folder / RESULT).exists()):
        raise AttngapError(f"'{folder}' is not empty and not a diagnosis. Choose another folder")
    return pieces


def _check(model, context, passages, ranks, window, sinks, draws, verify, quick) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise AttngapError(
            f"context {context} is beyond the model's {limit} positions. Give a context of at most {limit}"
        )
    for label, value, least in (
        ("context", context, 16),
        ("passages", passages, 1),
        ("window", window, 1),
        ("sinks", sinks, 0),
        ("draws", draws, 1),
        ("verify", verify, 0),
    ):
        if value < least:
            raise AttngapError(f"{label} must be at least {least}, got {value}")
    if ranks and (min(ranks) < 1 or len(set(ranks)) < len(ranks) or max(ranks) >= min(context, DEPTH)):
        raise AttngapError(f"ranks must be distinct, from 1 to {min(context, DEPTH) - 1}, got {list(ranks)}")
    if verify and quick:
        raise AttngapError("verify needs fitted replacements, which quick does not make. Leave out one of the two")
