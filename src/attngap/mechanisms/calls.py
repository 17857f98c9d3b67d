"""What compiled calls are told of a hybrid mechanism, whether they may be made, and what computes its far part."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.feature_maps import FADED, FASTEST, LARGEST_SCALE, LARGEST_SIZE, Prototype
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops import native
from attngap.ops.hybrid import far_form
from attngap.ops.hybrid.table import CallSetting

AXES: dict[str, Any] = {"log_gain": (None, ..., None, None), "gain_weight": (None, ..., None, slice(None))}
LIMITS = {"largest_scale": LARGEST_SCALE, "largest_size": LARGEST_SIZE, "fastest": FASTEST, "faded": FADED}


def parameters_of(mechanism: Hybrid) -> dict[str, Tensor]:
    """What features and gain are computed from, by the names that a call knows."""
    if not isinstance(mechanism.feature_map, Prototype):
        return {}
    found = mechanism.feature_map._parameters | mechanism._parameters
    return {name: x for name, x in found.items() if x is not None}


def call_parameters(mechanism: Hybrid) -> dict[str, Tensor]:
    """The same with four axes each."""
    return {name: x.detach()[AXES.get(name, (None,))] for name, x in parameters_of(mechanism).items()}


def call_setting(mechanism: Hybrid, rotary: Angles | None) -> CallSetting:
    """All that does not change from call to call."""
    turned = {} if mechanism.rotary is None or rotary is None else mechanism.rotary.turned(rotary, mechanism.dim)
    if isinstance(mechanism.feature_map, Prototype):
        turned |= LIMITS
    if mechanism.reach is not None:
        turned |= {"reach": mechanism.reach}
    return CallSetting(mechanism.window, mechanism.sinks, mechanism.scale, mechanism.relative, **turned)


def possible() -> bool:
    """Whether a compiled call may be made here: not inside of what torch compiles, traces or transforms."""
    return (
        native.on()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
    )


def far_parts_by(mechanisms: Iterable[Mechanism], device: torch.device) -> str | None:
    """What reads the far keys of several tokens, by name, as it would be chosen now; None where nothing does."""
    found = set()
    for part in mechanisms:
        if isinstance(part, Hybrid) and part.feature_map.rank:
            dtype = next((x.dtype for x in part.parameters()), torch.float32)
            found.add(far_form(device, dtype, part.heads, part.feature_map.width, part.value_dim))
    return " and ".join(sorted(found)) or None
