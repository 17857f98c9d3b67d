"""A hybrid's output at evenly spaced rows of whole passages, its near part given: what fitting features costs least."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid

ROWS = 64  # of a passage, about, at which the output is compared


class FarRows:
    """Passages of one length, ready to compare a hybrid's output with what it shall be.

    Between one row and the next the same number of keys becomes far, so the far sums at all rows are running sums of
    products of equal size: one pass over the keys, whatever the length. Rows that see no far key are left out: nothing
    can be learned from them.
    """

    def __init__(
        self,
        mechanism: Hybrid,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h_kv t d"],
        v: Float[Tensor, "b h_kv t dv"],
        target: Float[Tensor, "b h t dv"],
        rotary: Angles | None,
    ):
        self.mechanism = mechanism
        self.near = mechanism.near(q, k, v)
        self.q, self.k = mechanism.content(q, rotary), mechanism.content(k, rotary)
        self.v, self.target = v, target
        self.energy = target.square().mean((0, 2, 3)).clamp(min=1e-12)  # (h,)
        self.near_error = (self.near.out - target).square().mean((0, 2, 3)) / self.energy

    @property
    def far(self) -> int:
        """Rows that see a far key."""
        return self.q.shape[2] - self.mechanism.window - self.mechanism.sinks

    def misfit(self, which: slice | Tensor, generator: torch.Generator | None = None) -> Float[Tensor, " h"]:
        """|out - target|^2 at some rows of these passages over the mean of |target|^2, for each head.

        With a generator the space between rows is drawn, so that all rows have their turn.
        """
        if self.far < 1:
            return self.near_error + 0 * sum(p.sum() for p in self.mechanism.parameters())
        step = max(1, self.far // ROWS)
        if generator is not None:
            step += int(torch.randint(step // 3 + 1, (), generator=generator))
        out, rows = self.output(which, step)
        error = (out - self.target[which][:, :, rows]).square().mean((0, 2, 3)) / self.energy
        return error * (self.far / self.q.shape[2])

    def output(self, which: slice | Tensor, step: int) -> tuple[Float[Tensor, "b h n dv"], Int[Tensor, " n"]]:
        """The hybrid's output at every `step`-th row that sees a far key, and these rows."""
        m = self.mechanism
        count = self.far // step
        far = slice(m.sinks, m.sinks + count * step)
        rows = m.sinks + m.window - 1 + step * (1 + torch.arange(count, device=self.q.device))
        position = torch.arange(self.q.shape[2], device=self.q.device)[None]
        fk = m.feature_map.key(self.k[which][:, :, far], position[:, far])  # (b, h_kv, n step, r)
        fq = m.feature_map.query(self.q[which][:, :, rows], position[:, rows])  # (b, h, n, r)
        cut = (count, step)
        keys, values = fk.unflatten(2, cut), self.v[which][:, :, far].unflatten(2, cut)  # (b, h_kv, n, step, ...)
        added = torch.cat((keys.mT @ values, keys.sum(3)[..., None]), -1)  # (b, h_kv, n, r, dv + 1)
        # A product with a triangle of ones: sums along so long a stride take several times as long.
        sums = (added.new_ones(count, count).tril() @ added.flatten(3)).view(added.shape)
        grouped = fq.unflatten(1, (m.kv_heads, -1)).transpose(2, 3)  # (b, h_kv, n, group, r)
        read = (grouped @ sums).transpose(2, 3).flatten(1, 2)  # (b, h, n, dv + 1)
        total, mass = read[..., :-1], read[..., -1]
        gain = m.gain_of(self.q[which][:, :, rows])
        near = [x[which][:, :, rows] for x in self.near]
        gain = gain + near[1] if m.relative else gain
        # softmax over the two masses, in logarithms: neither overflows
        share = (gain + mass.abs().clamp(min=TINY).log() - near[2]).sigmoid()[..., None]
        return (1 - share) * near[0] + share * total / mass.clamp(min=TINY)[..., None], rows


TINY = 1e-30  # a far mass below this is none
