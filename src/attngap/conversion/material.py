"""What a conversion reads: every passage of it, drawn once and for one purpose."""

import dataclasses

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.calibration import FactsPassage, Shares, TextParts, calibration, repeats, seed_for
from attngap.conversion.options import ConversionOptions
from attngap.heads.forward import predicts_next
from attngap.storage.checkpoint import Checkpoint

# Of so many joint steps all but one are on repeated tokens: recall loses far more than text does, and repeated tokens
# cost nothing and never run out.
TEXT_EVERY = 4
TARGETS = 2  # passages that --max-ppl-ratio is held to


@dataclasses.dataclass(frozen=True, eq=False)
class Material:
    """`short` are fitted to, but the last `heldout` of them judge; `targets` are what a perplexity ratio must hold on.

    `facts` and `repeated` are the long ones, where there are any.
    """

    tokenizer: PreTrainedTokenizerBase
    options: ConversionOptions
    short: Int[Tensor, "count context"]
    heldout: int
    targets: Int[Tensor, "n held"] | None = None
    facts: Int[Tensor, "1 length"] | None = None
    repeated: Int[Tensor, "1 t"] | None = None

    @classmethod
    def draw(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: str | list[str] | None,
        options: ConversionOptions,
        checkpoint: Checkpoint,
        *,
        long: int | None,
    ) -> "Material":
        """Passages of a conversion for `long` tokens, or of one that looks at short ones only."""
        o = options
        parts, targets, facts, repeated = TextParts(tokenizer, text, o.seed), None, None, None
        if o.max_ppl_ratio is not None:
            targets = torch.cat([parts.judging(o.max_ppl_length or o.context) for _ in range(TARGETS)])
        judge = parts.judging(o.context)
        if long is not None:
            facts = FactsPassage.make(tokenizer, parts.long(long), seed=seed_for(o.seed, "facts")).tokens
            seed = seed_for(o.seed, "long repeated")
            repeated = repeats(tokenizer, context=max(long // 2, o.context), beyond=o.window, seed=seed)
        done = checkpoint.get("tokens")
        if done is None:
            shares = Shares.of(o.tokens // o.context, generative=predicts_next(model))
            sizes = {"context": o.context, "window": o.window, "seed": o.seed}
            done = {"tokens": calibration(model, tokenizer, parts, judge, shares, **sizes)}
            checkpoint.put("tokens", done)
        short = done["tokens"]
        heldout = 3 if len(short) >= 6 else 1  # one passage of each kind, where there are enough
        return cls(tokenizer, o, short, heldout, targets, facts, repeated)

    def judging(self, *, recall: bool) -> Int[Tensor, "n context"]:
        """The held-out passages; with `recall` one more that asks for it, which then counts half of all."""
        held = self.short[-self.heldout :]
        return torch.cat([held, self._repeats("judging repeated", 0)]) if recall else held

    def joint(self, *, recall: bool) -> Int[Tensor, "steps context"]:
        """A passage for each joint step: of calibration, or with `recall` mostly new repeated random tokens."""
        o, train = self.options, len(self.short) - self.heldout
        generator = torch.Generator().manual_seed(seed_for(o.seed, "joint order"))
        order = torch.cat([torch.randperm(train, generator=generator) for _ in range(-(-o.joint // train))])
        chosen = self.short[order[: o.joint]]
        if recall:
            for step in range(o.joint):
                if (step + 1) % TEXT_EVERY:
                    chosen[step] = self._repeats("joint repeated", step)[0]
        return chosen

    def _repeats(self, role: str, number: int) -> Int[Tensor, "1 context"]:
        """Repeated random tokens that nothing else has."""
        o = self.options
        return repeats(self.tokenizer, context=o.context, beyond=o.window, seed=seed_for(o.seed, role, number))
