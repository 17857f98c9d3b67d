"""Linear layers of a converted model: one token by a compiled product, many by oneDNN's.

Decoding reads every weight once per token. torch's product of a single row does so at half the speed of memory here,
and once heads are replaced that is most of a token's time. Its product of many rows takes twice the time of oneDNN's on
processors that MKL was not written for.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from attngap.mechanisms.calls import possible
from attngap.ops.dense import dense_product
from attngap.ops.thin import ThinWeight


class Product:
    """What a linear layer computes, compiled for the few rows of a token and by oneDNN for many, where that may be."""

    def __init__(self, module: nn.Linear):
        self.module = module
        self.known: ThinWeight | None = None

    def __call__(self, input: Tensor) -> Tensor:
        if input.ndim < 2 or input.shape[-2] > 1 or not possible():
            return dense_product(input, self.module.weight, self.module.bias)
        known = self.thin()
        return known.times(input) if known.takes(input) else F.linear(input, known.weight, known.bias)

    def thin(self) -> ThinWeight:
        """The weight and the bias as they are now."""
        given = vars(self.module)["_parameters"]  # past __getattr__, which takes longer than all checks here
        if "weight" in given and "bias" in given:
            weight, bias = given["weight"], given["bias"]
        else:  # computed from others, by torch's parametrizations or pruning
            weight, bias = self.module.weight, self.module.bias
        known = self.known
        if known is None or not known.holds(weight, bias):
            known = self.known = ThinWeight(weight, bias)
        return known

    def __getstate__(self) -> dict:
        return {"module": self.module, "known": None}
