"""A model's layers one after the other, so that a backward pass holds one of them at a time.

A backward pass through a whole model keeps what every layer computed, and every weight it computed with: both grow with
the depth, and weights that are on disk would all come in. Here only the states between layers are kept; each layer is
run again when its turn comes, last to first.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PreTrainedModel

from attngap.models.capture import Call, Observer, capture
from attngap.models.placement import has_weights_elsewhere

WHOLE_GRAPH = 2**31  # bytes of weights up to which a graph through all layers is kept

_UNCHAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose layers read more than the one before


class _NotAChain(Exception):
    """A layer reads something of the layers before that is not the state they hand on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """One run of a model: the states that went into its layers, and its output as a function of the last state."""

    layers: Sequence[nn.Module]
    given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]  # arguments of each layer but for the state
    states: Sequence[Tensor]  # before each layer, and after the last
    output: Tensor

    def without_output(self) -> "Chain":
        """The output and what led to it, all logits as a rule, are large."""
        return dataclasses.replace(self, output=self.states[-1])

    def again(self, place: int) -> tuple[Tensor, Tensor]:
        """A layer's state before, which wants a gradient, and after."""
        before = self.states[place].detach().requires_grad_()
        args, options = self.given[place]
        args, options = ((before, *args[1:]), options) if args else ((), options | {"hidden_states": before})
        return before, _first(self.layers[place](*args, **options))


def run_chain(model: PreTrainedModel, read: Callable[[], Tensor]) -> Chain | None:
    """Let `read` run the model, and keep what a backward pass needs; None where the layers are no chain.

    For frozen weights, with gradients enabled: what depends on a layer in another way than by its state wants a
    gradient, and is found by that.
    """
    if model in _UNCHAINED:
        return None
    modules: list[nn.Module] = []
    states: list[Tensor] = []
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    layers = _candidates(model)
    try:
        if not layers:
            raise _NotAChain
        with _keeping(layers, states, given), capture(model, lambda call: _note(call, modules)):
            output = read()
        if stack_of(model, modules) != layers or not _reads_last_only(output, states):
            raise _NotAChain
    except _NotAChain:
        _UNCHAINED.add(model)
        return None
    return Chain(layers, given, states, output)


@contextlib.contextmanager
def again_by_layer(model: PreTrainedModel, watch: Observer) -> Iterator[None]:
    """`capture`, in which a graph keeps no more than the state before each layer and computes the layer again.

    Only where a whole graph would be large, or would hold weights that are on disk: computing again takes time.
    """
    layers = _candidates(model) if _too_large(model) else []

    def wrapped(layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def numbered(call: Call) -> Tensor | None:
            return watch(call if call.cross else dataclasses.replace(call, layer=layer))

        def both() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _Anew(lambda: capture(model, numbered))

        return lambda *args, **options: checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=both, **options
        )

    own = [vars(layer).get("forward") for layer in layers]
    try:
        for place, layer in enumerate(layers):
            layer.forward = wrapped(place, layer.forward)
        # To the end of each layer: accelerate puts weights back on disk there.
        with capture(model, watch), set_checkpoint_early_stop(False):
            yield
    finally:
        for layer, before in zip(layers, own, strict=True):
            if before is None:
                del layer.forward  # uncovers the class's own
            else:
                layer.forward = before


class _Anew:
    """A context that can be entered again, for a graph may be walked twice."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]):
        self.make, self.inside = make, contextlib.ExitStack()

    def __enter__(self) -> None:
        self.inside.enter_context(self.make())

    def __exit__(self, *error: Any) -> None:
        self.inside.close()


def _too_large(model: PreTrainedModel) -> bool:
    """By the weights of a layer: what it computes for some hundred tokens takes as much memory as a part of them."""
    return has_weights_elsewhere(model) or sum(p.nbytes for p in model.parameters()) > WHOLE_GRAPH


def _note(call: Call, modules: list[nn.Module]) -> None:
    if not call.cross:
        modules.append(call.module)


def _candidates(model: PreTrainedModel) -> list[nn.Module]:
    """The longest list of modules: the layers, if there is one stack of them."""
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    found = max(lists, key=len, default=[])
    return found if len(found) == len(set(found)) else []


@contextlib.contextmanager
def _keeping(
    layers: Sequence[nn.Module], states: list[Tensor], given: list[tuple[tuple[Any, ...], dict[str, Any]]]
) -> Iterator[None]:
    """Note each layer's arguments, and cut the graph behind it."""

    def before(_layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        state = args[0] if args else options.get("hidden_states")
        if not isinstance(state, Tensor) or (states and state is not states[-1]):
            raise _NotAChain
        rest = [*args[1:], *(value for name, value in options.items() if args or name != "hidden_states")]
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(rest)):
            raise _NotAChain
        if not states:
            states.append(state.detach().requires_grad_())
        without = {name: value for name, value in options.items() if args or name != "hidden_states"}
        given.append(((None, *args[1:]) if args else (), without))
        return (states[-1], *args[1:]) if args else args, without if args else without | {"hidden_states": states[-1]}

    def after(_layer: nn.Module, _args: Any, output: Any) -> Any:
        states.append(_first(output).detach().requires_grad_())
        return states[-1] if isinstance(output, Tensor) else (states[-1], *output[1:])

    hooks = []
    try:
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(layer.register_forward_hook(after))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else None
    if not isinstance(found, Tensor):
        raise _NotAChain
    return found


def _reads_last_only(output: Tensor, states: Sequence[Tensor]) -> bool:
    """Whether nothing of the output comes from a layer before the last but through the last: its graph tells."""
    found: set[int] = set()
    queue, seen = [output.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        queue += [each for each, _ in node.next_functions]
    return id(states[-1]) in found and not found & {id(state) for state in states[:-1]}


def stack_of(model: PreTrainedModel, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that hold these attention modules, one each and in order; empty where there is no such stack.

    ALBERT calls one module many times and T5 has two stacks.
    """
    for part in model.modules():
        if not isinstance(part, nn.ModuleList) or not len(part) == len(modules) == len(set(part)):
            continue
        if all(module in set(block.modules()) for module, block in zip(modules, part, strict=True)):
            return list(part)
    return []
