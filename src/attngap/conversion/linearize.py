"""From a plan to a converted model and its receipt: calibrate, fit, choose, fit jointly, measure."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.calibration import Shares, calibration, repeats
from attngap.conversion.choose import convert, group_sizes, head_damage, prune, refine
from attngap.conversion.evaluate import Measures, evaluate
from attngap.conversion.fitting import fit_all
from attngap.conversion.joint import Reference, fit_jointly, trainable
from attngap.conversion.quality import perplexity
from attngap.conversion.receipt import Receipt
from attngap.errors import AttngapError
from attngap.heads.choice import Keep, best_heads
from attngap.heads.forward import is_language_model
from attngap.heads.passages import passages
from attngap.heads.replacement import build_replacement, resolve_replacement
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import FitOptions
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.lora import add_lora
from attngap.models.plan import ModelFacts, Plan, Replacement, architecture, fingerprint
from attngap.models.positions import layer_positions
from attngap.models.save import Base, describe, mark, weights_hash
from attngap.models.swap import LayerShape, layer_shapes
from attngap.progress import progress
from attngap.provenance import provenance
from attngap.storage.checkpoint import Checkpoint, open_checkpoint

JUDGED, REHEARSED = 50, 100  # numbers of the repeated passage that judges, and of the first that joint steps see
JOINT_RATE = 7e-4  # at three times this the joint pass of a well-fitted model found nothing better than its start


def linearize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    text: str | Sequence[str] | None = None,
    *,
    mechanism: str | None = None,
    window: int | None = None,
    sinks: int | None = None,
    context: int = 1024,
    tokens: int = 20480,
    steps: int = 30,
    joint: int = 12,
    rounds: int = 2,
    keep: float | None = None,
    max_ppl_ratio: float | None = None,
    lora: int = 0,
    seed: int = 0,
    measures: Measures | None = None,
    work: str | Path | None = None,
    ray: str | None = None,
    quiet: bool | None = None,
) -> tuple[PreTrainedModel, Receipt]:
    """Replace the heads that `plan` does not keep; the converted model, which shares the original's weights.

    `tokens` of calibration in passages of `context`; `steps` of fitting a layer, `joint` of fitting all together,
    `rounds` of trading kept heads. Instead of the plan's heads, `keep` keeps that share, those whose replacements do
    most damage, and `max_ppl_ratio` looks for the smallest keep set; `bare_plan` makes a plan for these. A `work`
    folder keeps finished pieces, from which the same call goes on after it was killed. Layers are fitted side by side,
    or on the Ray cluster at `ray`. The original is not changed.
    """
    text = text if text is None or isinstance(text, str) else list(text)
    plan.check(model)
    replacement, standalone = resolve_replacement(plan.replacement, mechanism=mechanism, window=window, sinks=sinks)
    _check(model, context, tokens, steps, joint, rounds, lora, keep, max_ppl_ratio)
    shapes = [shape for shape in layer_shapes(model) if shape.obstacle is None]
    _check_obstacles(plan, shapes)
    where = layer_positions(model)
    built = {
        shape.layer: build_replacement(shape, replacement, standalone, reach=context, positions=where[shape.layer])
        for shape in shapes
    }
    options = {
        "mechanism": standalone or replacement.feature_map,
        "window": 0 if standalone else replacement.window,
        "sinks": 0 if standalone else replacement.sinks,
        "context": context,
        "tokens": tokens,
        "steps": steps,
        "joint": joint,
        "rounds": rounds,
        "keep": keep,
        "max_ppl_ratio": max_ppl_ratio,
        "lora": lora,
        "seed": seed,
    }
    threads = torch.get_num_threads() if ray is None else "ray"
    key = options | {"plan": plan.model_dump_json(), "text": text, "threads": threads}
    mechanisms = {layer: m for layer, (m, _) in built.items()}
    with open_checkpoint(_path(work), key) as checkpoint:
        run = _Run(model, tokenizer, plan, text, options, mechanisms, checkpoint, quiet)
        kept = run.fit_and_choose(ray)
        converted = run.join(kept)
        base = Base(name=plan.model.name, architecture=plan.model.architecture, sha256=weights_hash(model))
        fixed = {(layer, head) for layer, head in plan.keep if layer not in built}
        final = plan.model_copy(update={"keep": tuple(sorted(kept | fixed)), "replacement": replacement})
        mark(converted, describe(converted, {i: o for i, (_, o) in built.items()}, final, base, lora))
        receipt = run.receipt(converted, kept, measures or Measures())
    return converted, receipt


def bare_plan(
    model: PreTrainedModel, name: str, replacement: Replacement, granularity: Literal["head", "group"] = "head"
) -> Plan:
    """A plan that says everything but which heads to keep; those that cannot be replaced are kept."""
    shapes = layer_shapes(model)
    facts = ModelFacts(
        name=name,
        architecture=architecture(model),
        fingerprint=fingerprint(model),
        layers=len(shapes),
        heads=shapes[0].heads,
        kv_heads=shapes[0].kv_heads,
    )
    fixed = tuple((shape.layer, head) for shape in shapes if shape.obstacle for head in range(shape.heads))
    return Plan(model=facts, keep=fixed, replacement=replacement, granularity=granularity)


class _Run:
    """One conversion under way: what its stages share."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        plan: Plan,
        text: str | list[str] | None,
        options: dict[str, Any],
        mechanisms: dict[int, Mechanism],
        checkpoint: Checkpoint,
        quiet: bool | None,
    ):
        self.model, self.tokenizer, self.plan, self.text = model, tokenizer, plan, text
        self.options, self.mechanisms, self.checkpoint, self.quiet = options, mechanisms, checkpoint, quiet
        self.is_language_model = is_language_model(model)
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.errors: Tensor | None = None
        self.joined: dict[str, float] = {}
        self.tokens = self._calibrate()
        self.heldout = 3 if len(self.tokens) >= 6 else 1

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        start = time.monotonic()
        with progress(name, total, quiet=self.quiet) as advance:
            yield advance
        self.seconds[name] = round(time.monotonic() - start, 1)

    def _calibrate(self) -> Int[Tensor, "count context"]:
        context, seed = self.options["context"], self.options["seed"]
        shares = Shares.of(self.options["tokens"] // context, generative=self.is_language_model)
        with self._stage("calibration text", 1):
            done = self.checkpoint.get("tokens")
            if done is not None:
                return done["tokens"]
            near = self.options["window"]
            found = calibration(self.model, self.tokenizer, self.text, shares, context=context, window=near, seed=seed)
            self.checkpoint.put("tokens", {"tokens": found})
            return found

    def fit_and_choose(self, ray: str | None) -> Keep:
        o = self.options
        fit = FitOptions(steps=o["steps"], check=max(1, o["steps"] // 4), heldout=self.heldout, seed=o["seed"])
        with self._stage("fitting layers", len(self.mechanisms)) as advance:
            self.errors = fit_all(self.model, self.mechanisms, self.tokens, fit, self.checkpoint, advance, ray)
        done = self.checkpoint.get("keep")
        if done is not None:
            return frozenset((layer, head) for layer, head in done["keep"].tolist())
        with self._stage("choosing heads", o["rounds"]) as advance:
            keep = self._choose(advance)
        self.checkpoint.put("keep", {"keep": torch.tensor(sorted(keep), dtype=torch.long).reshape(-1, 2)})
        return keep

    def _choose(self, advance: Callable[..., None]) -> Keep:
        o, heads = self.options, self._heads()
        options = {"rounds": o["rounds"], "grouped": self.plan.granularity == "group", "advance": advance}
        if o["max_ppl_ratio"] is not None:
            keep = self._smallest()
        elif o["keep"] is not None:
            count = round(o["keep"] * heads)
            return prune(self.model, self.mechanisms, count, self._reference, **options)
        else:
            keep = frozenset((layer, head) for layer, head in self.plan.keep if layer in self.mechanisms)
        if not 0 < len(keep) < heads:
            return keep
        return refine(self.model, self.mechanisms, keep, self._reference, **options)

    @functools.cached_property
    def _reference(self) -> Reference:
        """The held-out passages; of a language model one more that asks for recall, which then counts half of all."""
        heldout = self.tokens[-self.heldout :]
        if self.is_language_model:
            heldout = torch.cat([heldout, self._repeats(JUDGED)])
        return Reference(self.model, heldout, self._exact)

    @property
    def _exact(self) -> int:
        """Tokens of a passage that every replacement computes as softmax does."""
        part = next(iter(self.mechanisms.values()), None)
        return part.window + part.sinks if isinstance(part, Hybrid) else 0

    def _repeats(self, number: int) -> Int[Tensor, "1 context"]:
        """Repeated random tokens that calibration does not have."""
        o = self.options
        return repeats(self.tokenizer, context=o["context"], beyond=o["window"], seed=o["seed"] + number)

    def _heads(self) -> int:
        return sum(m.heads for m in self.mechanisms.values())

    def _smallest(self) -> Keep:
        """Bisection over the number of kept heads, ordered by the damage their replacements do."""
        target = self.options["max_ppl_ratio"]
        judged = passages(self.tokenizer, self.text, context=self.options["context"], count=2, split="heldout")
        scores = head_damage(self.model, self.mechanisms, self._reference)
        group = group_sizes(self.mechanisms, grouped=self.plan.granularity == "group")
        before = perplexity(self.model, judged)
        low, high, best = 0, self._heads(), frozenset(scores)
        ratio = 1.0
        while low < high:
            middle = (low + high) // 2
            keep = best_heads(scores, middle, group)
            found = perplexity(convert(self.model, self.mechanisms, keep), judged) / before
            if found <= target:
                high, best, ratio = middle, keep, found
            else:
                low = middle + 1
        if ratio > target:
            self.notes.append(
                f"No keep set reaches a perplexity ratio of {target}: even all {self._heads()} heads kept give 1.000"
            )
        return best

    def join(self, keep: Keep) -> PreTrainedModel:
        o = self.options
        converted = convert(self.model, self.mechanisms, keep)
        if o["lora"]:
            add_lora(converted, o["lora"], seed=o["seed"])
        if not o["joint"] or not trainable(converted):
            return converted
        with self._stage("fitting jointly", o["joint"]) as advance:
            before, after = fit_jointly(
                self.model,
                converted,
                self._rehearsal(),
                self._reference,
                rate=JOINT_RATE,
                checkpoint=self.checkpoint,
                advance=advance,
            )
        self.joined = {"before": before, "after": after}
        return converted

    def _rehearsal(self) -> Int[Tensor, "steps context"]:
        """What the joint pass sees: new repeated random tokens, and every fourth time a passage of calibration.

        Recall loses far more than text does, and repeated tokens cost nothing and never run out.
        """
        o, train = self.options, len(self.tokens) - self.heldout
        generator = torch.Generator().manual_seed(o["seed"])
        order = torch.cat([torch.randperm(train, generator=generator) for _ in range(-(-o["joint"] // train))])
        chosen = self.tokens[order[: o["joint"]]]
        if self.is_language_model:
            for step in range(o["joint"]):
                if step % 4 < 3:
                    chosen[step] = self._repeats(REHEARSED + step)[0]
        return chosen

    def receipt(self, converted: PreTrainedModel, keep: Keep, measures: Measures) -> Receipt:
        with self._stage("measuring", 1):
            quality, speed = evaluate(
                self.model, converted, self.tokenizer, self.text, measures, context=self.options["context"]
            )
        part = next(iter(self.mechanisms.values()))
        group = part.heads // part.kv_heads
        replaced = [
            float(self.errors[i, h])
            for i, (layer, m) in enumerate(self.mechanisms.items())
            for h in range(m.heads)
            if self.errors is not None and (layer, h) not in keep
        ]
        facts = self.plan.model
        whole = {(layer, head // group) for layer, head in keep}
        skipped = facts.layers - len(self.mechanisms)
        made = Receipt(
            model=facts.name,
            mechanism=self.options["mechanism"],
            heads=facts.layers * facts.heads,
            kept=len(keep) + skipped * facts.heads,
            groups=facts.layers * facts.kv_heads,
            kept_groups=len(whole) + skipped * facts.kv_heads,
            keep=sorted(keep),
            options=self.options,
            quality=quality,
            speed=speed,
            fit_error=_summary(replaced),
            joint=self.joined,
            seconds=self.seconds,
            notes=self.notes,
            provenance=provenance(seed=self.options["seed"], model=facts.name),
        )
        late = ["this run resumed an earlier one; seconds are its own only"] if self.checkpoint.resumed else []
        return made.model_copy(update={"notes": [*made.notes, *late, *made.shortcomings()]})


def _summary(errors: list[float]) -> dict[str, float]:
    if not errors:
        return {}
    values = torch.tensor(errors)
    return {"median": float(values.median()), "worst": float(values.max())}


def _path(work: str | Path | None) -> Path | None:
    return None if work is None else Path(work)


def _check(model, context, tokens, steps, joint, rounds, lora, keep, max_ppl_ratio) -> None:
    for label, value, least in (
        ("context", context, 16),
        ("steps", steps, 0),
        ("joint", joint, 0),
        ("rounds", rounds, 0),
        ("lora", lora, 0),
        ("tokens", tokens, 2 * context),
    ):
        if value < least:
            raise AttngapError(f"{label} must be at least {least}, got {value}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise AttngapError(f"context {context} is beyond the model's {limit} positions. Give at most {limit}")
    if keep is not None and not 0 <= keep <= 1:
        raise AttngapError(f"keep takes a share from 0 to 1, got {keep}. For a tenth of the heads: 0.1")
    if keep is not None and max_ppl_ratio is not None:
        raise AttngapError("keep and max_ppl_ratio both say which heads to keep. Give one of them")
    if max_ppl_ratio is not None:
        if model.get_output_embeddings() is None:
            raise AttngapError("max_ppl_ratio needs a language model; an encoder has no perplexity. Give a plan")
        if not max_ppl_ratio > 0:
            raise AttngapError(f"max_ppl_ratio must be positive, such as 1.02, got {max_ppl_ratio}")


def _check_obstacles(plan: Plan, shapes: list[LayerShape]) -> None:
    """A head that cannot be replaced must be kept by the plan."""
    able = {shape.layer for shape in shapes}
    for layer, head in plan.replaced():
        if layer not in able:
            raise AttngapError(
                f"The plan replaces head {layer}.{head}, but that layer has a sliding window or a position bias of its "
                "own and stays softmax. Keep its heads"
            )
