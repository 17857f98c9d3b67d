"""Floors weighted by what the model reads: gathered while damage is estimated, which has the gradients at hand."""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.diagnosis.bounds import weighted_floors
from attngap.heads.inputs import LayerInputs
from attngap.models.plan import Replacement


@dataclasses.dataclass
class ReadWeights:
    """One passage: what each layer's heads read, and the squared gradients at the rows of their outputs."""

    inputs: dict[int, LayerInputs] = dataclasses.field(default_factory=dict)
    squares: dict[int, Float[Tensor, "h t"]] = dataclasses.field(default_factory=dict)
    draws: dict[int, int] = dataclasses.field(default_factory=dict)

    def add_inputs(self, layer: int, inputs: LayerInputs) -> None:
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))  # else the graph stays in memory
        self.inputs[layer] = dataclasses.replace(inputs, q=q, k=k, v=v)

    def add_gradient(self, layer: int, gradient: Float[Tensor, "h t dv"]) -> None:
        self.squares[layer] = self.squares.get(layer, 0) + gradient.float().square().sum(-1)
        self.draws[layer] = self.draws.get(layer, 0) + 1

    def floors(self, layer: int, ranks: tuple[int, ...], near: Replacement) -> Float[Tensor, "h ranks"]:
        """Of every head; zeros stand where a head is linear already."""
        inputs = self.inputs[layer]
        found = torch.zeros(inputs.heads, len(ranks), dtype=torch.float64)
        softmax = [head for head in range(inputs.heads) if head not in inputs.linear]
        if softmax:
            gradients = (self.squares[layer] / self.draws[layer]).sqrt()
            values = inputs.v.repeat_interleave(inputs.group, 0).float()
            found[softmax] = weighted_floors(
                inputs.weights()[softmax],
                gradients[softmax],
                values[softmax],
                ranks,
                window=near.window,
                sinks=near.sinks,
                causal=inputs.causal,
            )
        return found
