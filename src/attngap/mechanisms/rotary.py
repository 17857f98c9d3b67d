"""Rotary positions: turning queries and keys by their positions, and back, in the layouts that models use."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.errors import unknown
from attngap.ops.check import accumulate_dtype

PAIRS, ANGLES, PLACES = ("halves", "adjacent"), ("halves", "adjacent", "once"), ("first", "last")
Angles = tuple[Tensor, Tensor]  # cos and sin, (1 or b, t, w), as a model's rotary module gives them


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Which channels of a head turn together, and where cos and sin hold their angle.

    `pairs`: channel i with i + n ("halves", Llama) or 2i with 2i + 1 ("adjacent", GPT-J). `angles`: cos and sin hold
    every angle twice, in "halves" or "adjacent", or "once". `place`: where a head that turns in part has these
    channels.
    """

    pairs: str = "halves"
    angles: str = "halves"
    place: str = "first"

    def __post_init__(self):
        for label, value, known in (
            ("rotary pairs", self.pairs, PAIRS),
            ("rotary angles", self.angles, ANGLES),
            ("rotary place", self.place, PLACES),
        ):
            if value not in known:
                raise unknown(label, value, known)

    def rotate(self, x: Float[Tensor, "b h t d"], angles: Angles) -> Float[Tensor, "b h t d"]:
        """What the model does to x before attention."""
        return self._apply(x, *self._planes(angles, x))

    def unrotate(self, x: Float[Tensor, "b h t d"], angles: Angles) -> Float[Tensor, "b h t d"]:
        """The inverse of `rotate`: x as it was before it knew its position. Scaled cos and sin are undone as well."""
        c, s = self._planes(angles, x)
        size = c.square() + s.square()
        return self._apply(x, c / size, -s / size)

    def once(self, angles: Angles) -> Angles:
        """Each angle once, (1 or b, t, pairs), for `unrotate_once`."""
        cut = self._cut(angles)
        return angles[0][..., cut], angles[1][..., cut]

    def unrotate_once(self, x: Float[Tensor, "b h t d"], angles: Angles) -> Float[Tensor, "b h t d"]:
        """`unrotate` by cos and sin that hold each angle once."""
        return dataclasses.replace(self, angles="once").unrotate(x, angles)

    def on_average(
        self, x: Float[Tensor, "n d"], angles: Angles, distance: Float[Tensor, " m"], share: Float[Tensor, "n m"]
    ) -> Float[Tensor, "n d"]:
        """Each row turned by distances that it meets in these shares, on average; slow channels stay, fast ones vanish.

        The first two positions of `angles` must follow each other: they tell how fast each pair of channels turns.
        """
        c, s = self._planes(angles, x)
        c, s = c[0, 0, :2], s[0, 0, :2]  # (2, pairs)
        speed = torch.atan2(s[1] * c[0] - c[1] * s[0], c[1] * c[0] + s[1] * s[0])
        turned = distance[:, None] * speed  # (m, pairs)
        share = share / share.sum(-1, keepdim=True)
        return self._apply(x[None, None], (share @ turned.cos())[None, None], (share @ turned.sin())[None, None])[0, 0]

    def fits(self, angles: Angles, dim: int) -> bool:
        """Whether a head of this size has the channels that such cos and sin turn."""
        width = angles[0].shape[-1]
        return 2 * width <= dim if self.angles == "once" else width <= dim and width % 2 == 0

    def turned(self, angles: Angles, dim: int) -> dict[str, Any]:
        """The channels that such cos and sin turn, as a compiled call knows them."""
        width = angles[0].shape[-1]
        pairs = width if self.angles == "once" else width // 2
        first = 0 if self.place == "first" else dim - 2 * pairs
        step = 2 if self.angles == "adjacent" else 1
        return {"turned": pairs, "turned_first": first, "adjacent": self.pairs == "adjacent", "angle_step": step}

    def _planes(self, angles: Angles, x: Tensor) -> tuple[Float[Tensor, "b 1 t n"], Float[Tensor, "b 1 t n"]]:
        dtype = accumulate_dtype(x.dtype)
        c, s = (each.to(dtype)[:, None] for each in self.once(angles))
        return c, s

    def _cut(self, angles: Angles) -> slice:
        half = angles[0].shape[-1] // 2
        return {"halves": slice(half), "adjacent": slice(None, None, 2), "once": slice(None)}[self.angles]

    def _apply(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        wide = 2 * c.shape[-1]
        rest = x.shape[-1] - wide
        part = x[..., :wide] if self.place == "first" else x[..., rest:]
        part = part.to(c.dtype)
        if self.pairs == "halves":
            one, two = part.chunk(2, -1)
            turned = torch.cat((one * c - two * s, two * c + one * s), -1)
        else:
            one, two = part[..., ::2], part[..., 1::2]
            turned = torch.stack((one * c - two * s, two * c + one * s), -1).flatten(-2)
        turned = turned.to(x.dtype)
        if not rest:
            return turned
        still = x[..., wide:] if self.place == "first" else x[..., :rest]
        return torch.cat((turned, still) if self.place == "first" else (still, turned), -1)


def cut(angles: Angles | None, rows: slice, tokens: slice | Tensor) -> Angles | None:
    """Those of some tokens of some sequences."""
    if angles is None:
        return None
    cos, sin = (x[rows if len(x) > 1 else slice(None)][:, tokens] for x in angles)
    return cos, sin


def every_layout() -> list[Rotary]:
    """All of them, the common ones first."""
    return [Rotary(pairs, angles, place) for place in PLACES for angles in ANGLES for pairs in PAIRS]


def layout(options: Mapping[str, str] | None) -> Rotary | None:
    """From the options a converted folder holds."""
    return None if options is None else Rotary(**options)
