"""The stages of a conversion, and what they share."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.calibration import Shares, calibration, repeats
from attngap.conversion.choose import convert, group_sizes, head_damage, prune, refine
from attngap.conversion.fitting import fit_all
from attngap.conversion.joint import Reference, fit_jointly, trainable
from attngap.conversion.long import LongCalibration, fit_slices, long_enough, prune_by_slices
from attngap.conversion.options import ConversionOptions
from attngap.conversion.quality import perplexity
from attngap.conversion.receipt import Receipt
from attngap.conversion.slices import SliceReference
from attngap.heads.choice import Keep, best_heads
from attngap.heads.forward import predicts_next
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import FitOptions
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.lora import add_lora
from attngap.models.plan import Plan
from attngap.progress import progress
from attngap.provenance import provenance
from attngap.storage.checkpoint import Checkpoint

# Offsets of the seed for repeated random tokens that calibration does not have: of the held-out passage, and of the
# first that joint steps see.
HELDOUT_SEED, JOINT_SEED = 50, 100
JOINT_RATE = 7e-4  # at three times this the joint pass of a well-fitted model found nothing better than its start
# Of so many joint steps all but one are on repeated tokens: recall loses far more than text does, and repeated tokens
# cost nothing and never run out.
TEXT_EVERY = 4
LONGEST = 8192  # tokens a conversion is for unless told: reading longer passages takes minutes


class ConversionRun:
    """One conversion under way. Every stage leaves its result in the checkpoint, and takes it from there."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        plan: Plan,
        text: str | list[str] | None,
        options: ConversionOptions,
        mechanisms: dict[int, Mechanism],
        checkpoint: Checkpoint,
        quiet: bool | None,
    ):
        self.model, self.tokenizer, self.plan, self.text = model, tokenizer, plan, text
        self.options, self.mechanisms, self.checkpoint, self.quiet = options, mechanisms, checkpoint, quiet
        self.is_language_model = predicts_next(model)
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.errors: Tensor | None = None
        self.joint: dict[str, float] = {}
        self.tokens = self._calibrate()
        self.heldout = 3 if len(self.tokens) >= 6 else 1  # one passage of each kind, where there are enough
        self.length = self._length()
        self.long = self._long() if self._slices() else None
        if not all(getattr(m, "reach", None) is None for m in mechanisms.values()):
            self.notes.append(
                f"positions enter this model's keys in a way that cannot be undone: from token {options.context} on "
                "replaced heads read sinks and window only"
            )

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Show progress and note the time."""
        start = time.monotonic()
        with progress(name, total, quiet=self.quiet) as advance:
            yield advance
        self.seconds[name] = round(time.monotonic() - start, 1)

    def _calibrate(self) -> Int[Tensor, "count context"]:
        o = self.options
        shares = Shares.of(o.tokens // o.context, generative=self.is_language_model)
        with self.stage("calibration text", 1):
            done = self.checkpoint.get("tokens")
            if done is not None:
                return done["tokens"]
            sizes = {"context": o.context, "window": o.window, "seed": o.seed}
            found = calibration(self.model, self.tokenizer, self.text, shares, **sizes)
            self.checkpoint.put("tokens", {"tokens": found})
            return found

    def _length(self) -> int:
        """The tokens a conversion is for."""
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or self.options.context
        return min(own, LONGEST) if self.options.length is None else min(own, self.options.length)

    def _slices(self) -> bool:
        """Whether long passages and slices of them calibrate: LoRA's weights are not among what slices train."""
        able = self.is_language_model and not self.model.config.is_encoder_decoder and not self.options.lora
        return able and long_enough(self.mechanisms, self.length, self.options.context)

    def _long(self) -> LongCalibration:
        o = self.options
        sizes = {"heldout": self.heldout, "length": self.length, "window": o.window, "exact": self._exact}
        return LongCalibration(self.model, self.tokenizer, self.text, self.tokens, seed=o.seed, **sizes)

    @functools.cached_property
    def _slice_reference(self) -> SliceReference:
        assert self.long is not None
        return SliceReference(self.model, self.mechanisms, self.long.judges())

    def fit_and_choose(self, ray: str | None) -> Keep:
        """Fit every layer to its own outputs, then choose the heads that keep softmax."""
        o = self.options
        steps: dict[str, Any] = {"steps": o.steps, "check": max(1, o.steps // 4), "batch": 2}
        fit = FitOptions(heldout=self.heldout, seed=o.seed, horizon=self.length, **steps)
        longer = None
        if self.long is not None:
            with self.stage("reading long passages", 2) as advance:
                self.long.read(advance)
            longer = self.long.seen
        with self.stage("fitting layers", len(self.mechanisms)) as advance:
            shared = (self.model, self.mechanisms, self.tokens, fit, self.checkpoint, advance, ray)
            self.errors = fit_all(*shared, longer=longer)
        done = self.checkpoint.get("keep")
        if done is not None:
            return frozenset((layer, head) for layer, head in done["keep"].tolist())
        with self.stage("choosing heads", o.rounds) as advance:
            keep = self._choose(advance)
        self.checkpoint.put("keep", {"keep": torch.tensor(sorted(keep), dtype=torch.long).reshape(-1, 2)})
        return keep

    def _choose(self, advance: Callable[..., None]) -> Keep:
        o, heads = self.options, self._heads()
        how = {"rounds": o.rounds, "grouped": o.granularity == "group", "advance": advance}
        if o.max_ppl_ratio is not None:
            keep = self._smallest(o.max_ppl_ratio)
        elif o.keep is not None and self.long is not None:
            group = group_sizes(self.mechanisms, grouped=o.granularity == "group")
            count = round(o.keep * heads)
            return prune_by_slices(self._slice_reference, count, group, rounds=o.rounds, advance=advance)
        elif o.keep is not None:
            return prune(self.model, self.mechanisms, round(o.keep * heads), self._reference, **how)
        else:
            keep = frozenset((layer, head) for layer, head in self.plan.keep if layer in self.mechanisms)
        if not 0 < len(keep) < heads:
            return keep
        return refine(self.model, self.mechanisms, keep, self._reference, **how)

    @functools.cached_property
    def _reference(self) -> Reference:
        """The held-out passages; of a language model one more that asks for recall, which then counts half of all."""
        heldout = self.tokens[-self.heldout :]
        if self.is_language_model:
            heldout = torch.cat([heldout, self._repeats(HELDOUT_SEED)])
        return Reference(self.model, heldout, self._exact)

    @property
    def _exact(self) -> int:
        """Tokens of a passage that every replacement computes as softmax does."""
        part = next(iter(self.mechanisms.values()), None)
        return part.window + part.sinks if isinstance(part, Hybrid) else 0

    def _repeats(self, number: int) -> Int[Tensor, "1 context"]:
        """Repeated random tokens that calibration does not have."""
        o = self.options
        return repeats(self.tokenizer, context=o.context, beyond=o.window, seed=o.seed + number)

    def _heads(self) -> int:
        return sum(m.heads for m in self.mechanisms.values())

    def _smallest(self, target: float) -> Keep:
        """Bisection over the number of kept heads, ordered by the damage their replacements do."""
        tokens = self.tokens[-min(2, self.heldout) :]  # not fitted to, and of another part of the text than a receipt
        scores = head_damage(self.model, self.mechanisms, self._reference)
        group = group_sizes(self.mechanisms, grouped=self.options.granularity == "group")
        before = perplexity(self.model, tokens)
        low, high, best = 0, self._heads(), frozenset(scores)
        ratio = 1.0
        while low < high:
            middle = (low + high) // 2
            keep = best_heads(scores, middle, group)
            found = perplexity(convert(self.model, self.mechanisms, keep), tokens) / before
            if found <= target:
                high, best, ratio = middle, keep, found
            else:
                low = middle + 1
        if ratio > target:
            self.notes.append(
                f"No keep set reaches a perplexity ratio of {target}: even all {self._heads()} heads kept give 1.000"
            )
        return best

    def fit_jointly(self, keep: Keep) -> PreTrainedModel:
        """The converted model, its replacements fitted together."""
        o = self.options
        converted = convert(self.model, self.mechanisms, keep)
        if o.lora:
            add_lora(converted, o.lora, seed=o.seed)
        if not o.joint or not trainable(converted):
            return converted
        with self.stage("fitting jointly", o.joint) as advance:
            if self.long is not None:
                before, after = self._fit_slices(keep, advance)
            else:
                before, after = fit_jointly(
                    self.model,
                    converted,
                    self._joint_passages(),
                    self._reference,
                    rate=JOINT_RATE,
                    checkpoint=self.checkpoint,
                    advance=advance,
                )
        self.joint = {"before": before, "after": after}
        return converted

    def _fit_slices(self, keep: Keep, advance: Callable[..., None]) -> tuple[float, float]:
        """Of the mechanisms that the converted model shares."""
        assert self.long is not None
        o, parts = self.options, self.mechanisms
        done = self.checkpoint.get("joint-slices")
        if done is None:
            before, after = fit_slices(self._slice_reference, keep, self.long.slices(o.joint, o.seed), o.joint, advance)
            state = {f"{layer}.{name}": x for layer, m in parts.items() for name, x in m.state_dict().items()}
            self.checkpoint.put("joint-slices", state | {"divergence": torch.tensor([before, after])})
            return before, after
        before, after = done.pop("divergence").tolist()
        for layer, m in parts.items():
            m.load_state_dict({name: done[f"{layer}.{name}"] for name in m.state_dict()})
        return before, after

    def _joint_passages(self) -> Int[Tensor, "steps context"]:
        """New repeated random tokens, and every fourth time a passage of calibration."""
        o, train = self.options, len(self.tokens) - self.heldout
        generator = torch.Generator().manual_seed(o.seed)
        order = torch.cat([torch.randperm(train, generator=generator) for _ in range(-(-o.joint // train))])
        chosen = self.tokens[order[: o.joint]]
        if self.is_language_model:
            for step in range(o.joint):
                if (step + 1) % TEXT_EVERY:
                    chosen[step] = self._repeats(JOINT_SEED + step)[0]
        return chosen

    def receipt(self, keep: Keep) -> Receipt:
        """What was kept and how well the others fit; nothing is measured yet."""
        part = next(iter(self.mechanisms.values()))
        group = part.heads // part.kv_heads
        facts = self.plan.model
        skipped = facts.layers - len(self.mechanisms)
        return Receipt(
            model=facts.name,
            mechanism=self.options.mechanism,
            heads=facts.layers * facts.heads,
            kept=len(keep) + skipped * facts.heads,
            groups=facts.layers * facts.kv_heads,
            kept_groups=len({(layer, head // group) for layer, head in keep}) + skipped * facts.kv_heads,
            keep=sorted(keep),
            options=self.options.record(),
            fit_error=self._fit_error(keep),
            joint=self.joint,
            seconds=dict(self.seconds),
            notes=[*self.notes, *(["this run resumed an earlier one; seconds are its own only"] * self._resumed)],
            positions=getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
            provenance=provenance(seed=self.options.seed, model=facts.name),
        )

    @property
    def _resumed(self) -> bool:
        return self.checkpoint.resumed

    def _fit_error(self, keep: Keep) -> dict[str, float]:
        """Median and worst over the replaced heads, held out."""
        assert self.errors is not None, "fit_and_choose comes first"
        replaced = [
            float(self.errors[i, head])
            for i, (layer, m) in enumerate(self.mechanisms.items())
            for head in range(m.heads)
            if (layer, head) not in keep
        ]
        if not replaced:
            return {}
        values = torch.tensor(replaced)
        return {"median": float(values.median()), "worst": float(values.max())}
