"""Run a model again without its first layers: a change in a late layer leaves all earlier ones as they were."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.heads.forward import forward
from attngap.models.capture import capture


class Replay:
    """Outputs of a model's layers on one input, given back in later runs on that same input."""

    def __init__(self, model: PreTrainedModel, tokens: Int[Tensor, "1 t"]):
        modules: list[nn.Module] = []
        with capture(model, lambda call: None if call.cross else modules.append(call.module)):
            forward(model, tokens[:, :2])
        self.stack = stack_of(model, modules)
        self.outputs: list[Any] = [None] * len(self.stack)

    def record(self, run: Callable[[], Any]) -> Any:
        """The result of a full run, whose layers' outputs are kept."""

        def note(place: int) -> Callable[..., None]:
            def keep(_module: nn.Module, _args: Any, output: Any) -> None:
                self.outputs[place] = output

            return keep

        hooks = [block.register_forward_hook(note(place)) for place, block in enumerate(self.stack)]
        try:
            return run()
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def until(self, layer: int) -> Iterator[int]:
        """Inside, layers before this one are not computed; yields how many are skipped (none without a stack)."""
        skipped = list(zip(self.stack, self.outputs, strict=True))[:layer]
        try:
            for block, output in skipped:
                block.forward = lambda *_args, _output=output, **_kwargs: _output
            yield len(skipped)
        finally:
            for block, _ in skipped:
                del block.forward  # uncovers the class's own


def stack_of(model: PreTrainedModel, modules: list[nn.Module]) -> list[nn.Module]:
    """The layers that hold these attention modules, one each and in order; empty where there is no such stack.

    ALBERT calls one module many times and T5 has two stacks: their runs are not cut short.
    """
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == len(modules) == len(set(part)):
            holds = all(module in set(block.modules()) for module, block in zip(modules, part, strict=True))
            if holds and not any("forward" in vars(block) for block in part):
                return list(part)
    return []
