"""Floors weighted by what the model reads: gathered while damage is estimated, which has the gradients at hand."""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.diagnosis.bounds import weighted_floors
from attngap.heads.inputs import LayerInputs
from attngap.models.plan import Replacement


class ReadWeights:
    """One passage: what each layer's heads read, until the gradients at the rows of their outputs are there."""

    def __init__(self, ranks: tuple[int, ...], near: Replacement):
        self.ranks, self.near = ranks, near
        self._inputs: dict[int, LayerInputs] = {}
        self.floors: dict[int, Float[Tensor, "h ranks"]] = {}  # by layer; zeros where a head is linear already

    def add_inputs(self, layer: int, inputs: LayerInputs) -> None:
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))  # else the graph stays in memory
        self._inputs[layer] = dataclasses.replace(inputs, q=q, k=k, v=v)

    def add_gradients(self, layer: int, gradients: Float[Tensor, "draws h t dv"]) -> None:
        """Of all draws; the layer's floors follow at once, so that no layer waits for another with its inputs."""
        inputs = self._inputs.pop(layer)
        sizes = gradients.float().square().sum(-1).mean(0).sqrt()  # (h, t)
        found = torch.zeros(inputs.heads, len(self.ranks), dtype=torch.float64)
        softmax = [head for head in range(inputs.heads) if head not in inputs.linear]
        if softmax:
            values = inputs.v.repeat_interleave(inputs.group, 0).float()
            found[softmax] = weighted_floors(
                inputs.weights()[softmax],
                sizes[softmax],
                values[softmax],
                self.ranks,
                window=self.near.window,
                sinks=self.near.sinks,
                causal=inputs.causal,
            )
        self.floors[layer] = found
