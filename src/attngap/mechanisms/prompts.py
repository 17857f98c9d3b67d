"""A piece of a prompt by one compiled call: features and attention together, without tensors of features."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attngap.mechanisms.base import Mechanism, State
from attngap.mechanisms.calls import call_parameters, call_setting, possible
from attngap.mechanisms.feature_maps import Prototype
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops import native
from attngap.ops.hybrid import empty_state
from attngap.ops.hybrid.piece import advance_piece


def read_piece(
    mechanism: Mechanism,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    state: State | None = None,
    start: Int[Tensor, " b"] | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
    rotary: Angles | None = None,
    skipped: Int[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "b h t dv"], State] | None:
    """What `mechanism.read` and `advance` give for several tokens; None where there is no compiled form of both.

    The state is overwritten. Heads that are not 0 in `skipped` are not computed: their rows hold anything, and key
    heads that no other head reads are left out of the state.
    """
    if not isinstance(mechanism, Hybrid) or type(mechanism.feature_map) is not Prototype or not possible():
        return None
    if q.shape[2] == 1 or (mechanism.rotary is not None and rotary is None):
        return None
    rotary = None if mechanism.rotary is None else rotary
    mechanism.validate(None, q, k, v, mask)
    features = k.new_empty(()).expand(*k.shape[:3], mechanism.feature_map.width)
    state = empty_state(k, v, features, mechanism.window, mechanism.sinks) if state is None else state
    parameters = call_parameters(mechanism)
    if not native.usable(q, k, v, *parameters.values(), *_held(state), state=state["S"]):
        return None
    if not all(x.is_contiguous() for x in (*_held(state), state["S"], state["count"])):
        return None
    start = torch.zeros(len(q), dtype=torch.long) if start is None else start.contiguous()
    angles = None if rotary is None else (rotary[0].to(q.dtype), rotary[1].to(q.dtype))
    setting = call_setting(mechanism, rotary)
    out = advance_piece(state, q, k, v, setting, parameters, start, angles=angles, mask=mask, skipped=skipped)
    return out, state


def _held(state: State) -> list[Tensor]:
    return [state[name] for name in ("k", "v", "fk", "z")]
