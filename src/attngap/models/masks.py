"""Reading an attention mask, by one rule."""

import torch
from jaxtyping import Bool
from torch import Tensor

from attngap.errors import AttngapError

FORBIDS = -1e3  # added to a logit it leaves no weight at all; half precision still has the number


def readable(mask: Tensor) -> Bool[Tensor, "..."]:
    """True where a row may read a key: a boolean mask says so, an additive one has zero there.

    Numbers between zero and what forbids are a bias and not a mask, and are refused.
    """
    if mask.dtype == torch.bool:
        return mask
    allowed = mask > FORBIDS
    if bool((allowed & (mask != 0)).any()):
        raise AttngapError(
            "This attention mask has numbers other than zero where keys may be read: a bias of its own, which is not "
            "handled. Pass a 2D attention_mask, one sequence per row"
        )
    return allowed
