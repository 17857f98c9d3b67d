"""Run a model again without its first layers: a change in a late layer leaves all earlier ones as they were."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.heads.chain import stack_of
from attngap.heads.forward import forward
from attngap.models.capture import capture


class Replay:
    """Outputs of a model's layers on one input, given back in later runs on that same input."""

    def __init__(self, model: PreTrainedModel, tokens: Int[Tensor, "1 t"]):
        modules: list[nn.Module] = []
        with capture(model, lambda call: None if call.cross else modules.append(call.module)):
            forward(model, tokens[:, :2])
        # A layer whose forward is another's, such as accelerate's for weights on disk, is not cut short.
        found = stack_of(model, modules)
        self.stack = [] if any("forward" in vars(block) for block in found) else found
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
