"""The stages of a conversion, and what they share."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.choose import Judge, PassageJudge, convert, group_sizes, prune, refine
from attngap.conversion.fitting import fit_all
from attngap.conversion.joint import Reference, fit_jointly, trainable
from attngap.conversion.long import LongCalibration, fit_slices, long_enough
from attngap.conversion.material import Material
from attngap.conversion.options import ConversionOptions
from attngap.conversion.quality import perplexity
from attngap.conversion.receipt import Receipt
from attngap.conversion.slices import SliceReference
from attngap.conversion.windows import Windows, set_windows, share_windows
from attngap.heads.choice import Keep, best_heads
from attngap.heads.forward import predicts_next
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.calls import far_parts_by
from attngap.mechanisms.fit import FitOptions
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.lora import add_lora
from attngap.models.placement import device_of
from attngap.models.plan import Plan
from attngap.progress import progress
from attngap.provenance import provenance
from attngap.storage.checkpoint import Checkpoint

JOINT_RATE = 7e-4  # at three times this the joint pass of a well-fitted model found nothing better than its start
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
        self.windows: Windows = {}
        self.length = self._length()
        with self.stage("calibration text", 1):
            long = self.length if self._slices() else None
            self.material = Material.draw(model, tokenizer, text, options, checkpoint, long=long)
        self.long = self._long()
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

    def _length(self) -> int:
        """The tokens a conversion is for."""
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or self.options.context
        return min(own, LONGEST) if self.options.length is None else min(own, self.options.length)

    def _slices(self) -> bool:
        """Whether long passages and slices of them calibrate: LoRA's weights are not among what slices train."""
        able = self.is_language_model and not self.model.config.is_encoder_decoder and not self.options.lora
        return able and long_enough(self.mechanisms, self.length, self.options.context)

    def _long(self) -> LongCalibration | None:
        made = self.material
        if made.facts is None or made.repeated is None:
            return None
        sizes = {"heldout": made.heldout, "exact": self._exact, "folder": self.checkpoint.folder}
        return LongCalibration(self.model, made.short, made.facts, made.repeated, **sizes)

    @functools.cached_property
    def _slice_reference(self) -> SliceReference:
        assert self.long is not None
        return SliceReference(self.model, self.mechanisms, self.long.judges())

    def fit_and_choose(self, ray: str | None) -> Keep:
        """Fit every layer to its own outputs, then choose the heads that keep softmax."""
        o = self.options
        steps: dict[str, Any] = {"steps": o.steps, "check": max(1, o.steps // 4), "batch": 2}
        fit = FitOptions(heldout=self.material.heldout, seed=o.seed, horizon=self.length, **steps)
        more: dict[str, Any] = {}
        if self.long is not None:
            with self.stage("reading long passages", 2) as advance:
                self.long.read(advance)
            more = {"longer": self.long.seen, "read": self.long.read_short}
        with self.stage("fitting layers", len(self.mechanisms)) as advance:
            shared = (self.model, self.mechanisms, self.material.short, fit, self.checkpoint, advance, ray)
            self.errors = fit_all(*shared, **more)
        done = self.checkpoint.get("keep")
        if done is not None:
            return frozenset((layer, head) for layer, head in done["keep"].tolist())
        with self.stage("choosing heads", o.rounds) as advance:
            keep = self._choose(advance)
        self.checkpoint.put("keep", {"keep": torch.tensor(sorted(keep), dtype=torch.long).reshape(-1, 2)})
        return keep

    def _choose(self, advance: Callable[..., None]) -> Keep:
        o, heads = self.options, self._heads()
        group = group_sizes(self.mechanisms, grouped=o.granularity == "group")
        if o.max_ppl_ratio is not None:
            keep = self._smallest(o.max_ppl_ratio, group)
        elif o.keep is not None:
            return prune(self._judge, round(o.keep * heads), group, rounds=o.rounds, advance=advance)
        else:
            keep = frozenset((layer, head) for layer, head in self.plan.keep if layer in self.mechanisms)
        if not 0 < len(keep) < heads:
            return keep
        return refine(self._judge, keep, group, rounds=o.rounds, advance=advance)

    @property
    def _judge(self) -> Judge:
        if self.long is not None:
            return self._slice_reference
        return PassageJudge(self.model, self.mechanisms, self._reference)

    @functools.cached_property
    def _reference(self) -> Reference:
        return Reference(self.model, self.material.judging(recall=self.is_language_model), self._exact)

    @property
    def _exact(self) -> int:
        """Tokens of a passage that every replacement computes as softmax does."""
        part = next(iter(self.mechanisms.values()), None)
        return part.window + part.sinks if isinstance(part, Hybrid) else 0

    def _heads(self) -> int:
        return sum(m.heads for m in self.mechanisms.values())

    def _smallest(self, target: float, group: dict[int, int]) -> Keep:
        """Bisection over the number of kept heads, ordered by the damage their replacements do.

        The passages are not fitted to, judge nothing else, and are of another part of the text than a receipt.
        """
        tokens = self.material.targets
        assert tokens is not None
        scores = self._judge.head_damage()
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

    def share_windows(self, keep: Keep) -> None:
        """Give layers that need it more of the window, others less; slices tell which, where there are any."""
        if self.long is None or self.options.even_windows or len(keep) == self._heads():
            return
        done = self.checkpoint.get("windows")
        if done is None:
            self._slice_reference.forget()  # states of windows that may change
            pieces = self.long.text_slices()
            with self.stage("sharing out windows", len(pieces)) as advance:
                reference = SliceReference(self.model, self.mechanisms, pieces)
                found = share_windows(reference, keep, self.options.window, advance)
            self.checkpoint.put("windows", {"windows": torch.tensor(sorted(found.items()))})
        else:
            found = dict(done["windows"].tolist())
            set_windows(self.mechanisms, found)
        self.windows = found if len(set(found.values())) > 1 else {}

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
                    self.material.joint(recall=self.is_language_model),
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

    def hold_tokens(self) -> dict[int, dict[str, int]]:
        """Give a share of each window's room to tokens from anywhere, once everything is fitted; options by layer.

        Features are fitted to what lies beyond a plain window: what is held is only known when tokens have been read.
        """
        found: dict[int, dict[str, int]] = {}
        for layer, m in self.mechanisms.items():
            if isinstance(m, Hybrid):
                found[layer] = {"window": m.window} | m.sharing(self.options.held)
                for name, value in found[layer].items():
                    setattr(m, name, value)
        return found

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
            windows=self.windows,
            seconds=dict(self.seconds),
            notes=[*self.notes, *(["this run resumed an earlier one; seconds are its own only"] * self._resumed)],
            positions=getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
            provenance=provenance(
                seed=self.options.seed,
                model=facts.name,
                far_part=far_parts_by(self.mechanisms.values(), device_of(self.model)),
            ),
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
