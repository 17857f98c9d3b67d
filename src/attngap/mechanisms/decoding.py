"""Token after token of a layer's heads in one compiled call each: features, state and kept heads together."""

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from attngap.mechanisms.base import State
from attngap.mechanisms.calls import call_parameters, call_setting, parameters_of
from attngap.mechanisms.feature_maps import Nothing, Prototype
from attngap.mechanisms.held import rows_of
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops import native
from attngap.ops.hybrid.call import TokenCall

READ = ("k", "v", "S", "z", "cos", "sin")  # of what is held, by a token


class Decoder:
    """The step of `Hybrid` for one state, with all that stays the same from token to token laid out once.

    `fits` is asked before each token: parameters may have been replaced, the state reordered. `place` says where in the
    cache of kept heads the keys of a head are, -1 for heads that are not kept. `position` counts the tokens before this
    one for the features; it and the state are overwritten.
    """

    def __init__(
        self,
        mechanism: Hybrid,
        state: State,
        place: Int[Tensor, " h"],
        position: Int[Tensor, " b"],
        rotary: Angles | None,
        heads: Int[Tensor, " n"] | None = None,
    ):
        self.options, self.state, self.position = _options(mechanism), state, position
        parameters = call_parameters(mechanism)
        setting, rows = call_setting(mechanism, rotary), None if heads is None else rows_of(heads, mechanism.kv_heads)
        self.call = TokenCall(state, setting, place, parameters, position, mechanism.kv_heads, rows)
        self.angles = self.call.setting.turned > 0
        self.masked = False
        self.sources = (state, mechanism.feature_map._parameters, mechanism._parameters) if parameters else (state,)
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        return [x.data_ptr() for source in self.sources for x in source.values() if x is not None]

    def fits(self, mechanism: Hybrid, state: State, position: Tensor) -> bool:
        """Whether all that was laid out is still where it was."""
        if state is not self.state or position is not self.position or _options(mechanism) != self.options:
            return False
        return self._addresses() == self.addresses

    def token(
        self,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b h_kv 1 d"],
        v: Float[Tensor, "b h_kv 1 dv"],
        rotary: Angles | None,
        mask: Bool[Tensor, "b 1 1 n"] | None,
        cache: tuple[Tensor, Tensor, int] | None,
    ) -> Float[Tensor, "b 1 h dv"]:
        """`cache` are the keys and values of kept heads and how many there are with this token, which is written there.

        The last column of `mask` says whether the token is no padding, the others which keys kept heads may read.
        """
        call = self.call
        if self.angles and rotary is not None:
            call.put_angles(*rotary)
        if cache is not None:
            call.put_cache(*cache)
        if mask is not None or self.masked:
            call.put_mask(mask)
            self.masked = mask is not None
        return call.token(q, k, v, appends=cache is not None)


def decoder(
    mechanism: Hybrid,
    state: State,
    place: Int[Tensor, " h"],
    position: Int[Tensor, " b"],
    rotary: Angles | None,
    heads: Int[Tensor, " n"] | None = None,
) -> Decoder | None:
    """None where the features have no compiled form, or memory does not lie as it must.

    `heads` are the key heads that the state is of, where it is not of all.
    """
    if type(mechanism.feature_map) not in (Prototype, Nothing):
        return None
    if mechanism.rotary is not None and (rotary is None or rotary[0].dtype != state["S"].dtype):
        return None
    tensors = (*parameters_of(mechanism).values(), *(state[name] for name in READ if name in state))
    if not native.usable(*tensors, state=state["S"]):
        return None
    if not all(x.is_contiguous() for x in (*tensors, state["count"], position)):
        return None
    return Decoder(mechanism, state, place, position, rotary, heads)


def _options(mechanism: Hybrid) -> tuple[Any, ...]:
    near = mechanism.window, mechanism.sinks, mechanism.scale, mechanism.relative
    return (*near, mechanism.reach, mechanism.rotary, mechanism.feature_map)
