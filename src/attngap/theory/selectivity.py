"""Selection exponent: when can a row of attention select one key, or a few, among many?"""

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attngap.errors import AttngapError


@dataclasses.dataclass(frozen=True)
class Selection:
    """How sharply each row selects its `top` largest keys; NaN where a row has too few keys for the question.

    >>> selection(torch.tensor([[5.0, 1.0, 1.0, 1.0]])).margin.item()
    4.0
    """

    margin: Tensor  # M = log(mean weight of the selected keys / mean weight of the others), (..., rows)
    kappa: Tensor  # M / log((n - k) / k): at least 1 exactly when the selected keys hold half the mass
    mass: Tensor  # weight of the selected keys
    n_star: Tensor  # context at which the mass falls to half, *if* new competitors are like the present ones
    keys: Tensor  # n, the keys the row may read
    on_sink: Tensor  # is the largest weight on one of the first `sinks` keys

    def summary(self) -> dict[str, Tensor]:
        """Per head, over rows with a defined kappa whose top key is no sink; `sink_share`: the others' share."""
        defined = ~self.kappa.isnan()
        free = defined & ~self.on_sink

        def middle(x: Tensor, q: float) -> Tensor:
            return torch.where(free, x, torch.nan).nanquantile(q, dim=-1)

        return {
            "rows": free.sum(-1),
            "kappa": middle(self.kappa, 0.5),
            "kappa_p90": middle(self.kappa, 0.9),
            "margin": middle(self.margin, 0.5),
            "mass": middle(self.mass, 0.5),
            "n_star": middle(self.n_star, 0.5),
            "selecting": (free & (self.kappa >= 1)).sum(-1) / free.sum(-1).double(),
            "sink_share": (defined & self.on_sink).sum(-1) / defined.sum(-1).double(),
        }


def selection(
    logits: Float[Tensor, "*heads rows keys"],
    valid: Bool[Tensor, "..."] | None = None,
    *,
    top: int = 1,
    sinks: int = 0,
) -> Selection:
    """Selection exponent of every row (docs/theory.md 2.1): w_S = 1 / (1 + ((n-k)/k) e^(-M)), an identity.

    A key with logit -inf, or False in `valid` (broadcast against logits), is not there. Logits may be shifted by any
    constant a row, so log weights do as well; for a positive kernel pass its logarithm. `n_star` extrapolates.
    """
    logits = logits.double()
    if valid is not None:
        logits = logits.masked_fill(~valid, -torch.inf)
    if logits.isnan().any() or (logits == torch.inf).any():
        raise AttngapError("selection: logits must not be NaN or +inf; got some. Mask keys with -inf or valid=False")
    if not 1 <= top < logits.shape[-1]:
        raise AttngapError(f"selection: top must be 1 to {logits.shape[-1] - 1} (one less than the keys), got {top}")
    keys = (logits > -torch.inf).sum(-1)
    order = logits.topk(top, -1)
    chosen = order.values.logsumexp(-1)
    others = logits.scatter(-1, order.indices, -torch.inf).logsumexp(-1)
    enough = keys > top
    crowd = ((keys - top).double() / top).log()
    margin = torch.where(enough, chosen - others + crowd, torch.nan)
    return Selection(
        margin=margin,
        kappa=torch.where(keys > 2 * top, margin / crowd, torch.nan),
        mass=torch.where(enough, (chosen - logits.logsumexp(-1)).exp(), torch.nan),
        n_star=top * (1 + margin.exp()),
        keys=keys,
        on_sink=order.indices[..., 0] < sinks,
    )
