"""Where positions enter a layer's queries and keys, found on the model itself.

A sequence of one token repeated has the same hidden state at every place, in every layer: whatever the weights of a row
are, the values it averages are equal. So queries and keys differ from place to place by their position alone, and a way
of turning them back is right exactly if it makes them equal.
"""

import dataclasses
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.mechanisms.rotary import Angles, Rotary, every_layout
from attngap.models.capture import Call, capture
from attngap.models.placement import device_of

LENGTH = 48  # places looked at, where the model has as many
TOLERANCE = 1e-2  # of the size of a vector: half precision rounds by 0.004, a wrong layout is off by far more


_FOUND: "weakref.WeakKeyDictionary[nn.Module, Positions]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Positions:
    """How a layer's queries and keys know their position: not at all, by a rotary layout, or in some other way."""

    known: bool
    rotary: Rotary | None = None  # None and known: they do not

    def options(self) -> dict[str, Any]:
        """For a hybrid whose features do not see positions; none where that cannot be had."""
        return {} if self.rotary is None else {"rotary": dataclasses.asdict(self.rotary)}


def layer_positions(model: PreTrainedModel) -> list[Positions]:
    """Of every self-attention call, in order, by running one token, repeated, through the model."""
    found: list[Positions] = []

    def look(call: Call) -> None:
        if not call.cross:
            found.append(find_positions(call.q, call.k, call.rotary))
            _FOUND[call.module] = found[-1]

    config: Any = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or LENGTH
    tokens = torch.full((1, min(LENGTH, most)), config.vocab_size // 3, dtype=torch.long, device=device_of(model))
    extra = {"decoder_input_ids": tokens} if "decoder_input_ids" in inspect.signature(model.forward).parameters else {}
    was_training = model.training
    try:
        with torch.no_grad(), capture(model.eval(), look):
            model(input_ids=tokens, **extra)
    finally:
        model.train(was_training)
    return found


def positions_of(module: nn.Module) -> Positions | None:
    """What `layer_positions` has found for an attention module; None before it was asked."""
    return _FOUND.get(module)


def find_positions(q: Tensor, k: Tensor, angles: Angles | None) -> Positions:
    """From the queries and keys of one token repeated, and the cos and sin that came with them."""
    if _same(q) and _same(k):
        return Positions(known=True)
    if angles is not None:
        for layout in every_layout():
            if (
                layout.fits(angles, q.shape[-1])
                and _same(layout.unrotate(q, angles))
                and _same(layout.unrotate(k, angles))
            ):
                return Positions(known=True, rotary=layout)
    return Positions(known=False)


def _same(x: Tensor) -> bool:
    """Is the vector of each head the same at all places."""
    x = x.float()
    first = x[:, :, :1]
    return bool(((x - first).norm(dim=-1) <= TOLERANCE * first.norm(dim=-1) + 1e-9).all())
