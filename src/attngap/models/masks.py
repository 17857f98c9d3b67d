"""Reading an attention mask, by one rule."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from attngap.errors import AttngapError

_LAST = threading.local()
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


def _once(read: Callable[..., Any]) -> Callable[..., Any]:
    """What was read off a mask is kept until the next one: all layers of a model are given the same."""

    @functools.wraps(read)
    def reading(mask: Tensor, *options: Any) -> Any:
        if torch.compiler.is_compiling():
            return read(mask, *options)
        version = None if mask.is_inference() else mask._version
        kept, key = vars(_LAST), (read.__name__, *options, version)
        if "mask" not in kept or kept["mask"]() is not mask:
            kept |= {"mask": weakref.ref(mask), "found": {}}
        if key not in kept["found"]:
            kept["found"][key] = read(mask, *options)
        return kept["found"][key]

    return reading


def real_tokens(mask: Tensor | None, length: int, *, causal: bool) -> Bool[Tensor, "b t"] | None:
    """Which of the last `length` tokens are no padding, read off a mask `(b, 1, length, keys)`; None when all are.

    A replaced head knows padding and causality only, so a mask that says anything else is refused.
    """
    return None if mask is None else _real_tokens(mask, length, causal)


@_once
def _real_tokens(mask: Tensor, length: int, causal: bool) -> Bool[Tensor, "b t"] | None:
    allowed = readable(mask)
    if mask.shape[1] != 1:
        raise AttngapError("Replaced heads take one mask for all heads, and this one differs from head to head")
    new = allowed[:, 0, :, allowed.shape[3] - length :]  # (b, t, t)
    real = new.diagonal(dim1=1, dim2=2) if causal else new[:, 0]
    expected = real[:, None, :].expand(-1, length, -1)
    expected = expected.tril() if causal else expected
    if not torch.equal(new & real[:, :, None], expected & real[:, :, None]):
        raise AttngapError(
            "Replaced heads handle causal and padding masks only, and this mask is another (packed sequences, or "
            "one of your own). Pass a 2D attention_mask, one sequence a row"
        )
    return None if bool(real.all()) else real


@_once
def readable_keys(mask: Tensor) -> Bool[Tensor, "b n"] | None:
    """Which keys rows may read, beside that none reads ahead; None where rows of a mask differ in more than that."""
    allowed = readable(mask)[:, 0]  # (b, t, n)
    t, n = allowed.shape[1:]
    some = allowed.any(1)
    return some if torch.equal(allowed, some[:, None].expand(-1, t, -1).tril(n - t)) else None
