"""The call of the compiled step of decoding: a table of addresses, of which only a few change from token to token."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops import native, pages
from attngap.ops.check import check_finite
from attngap.ops.hybrid.state import State
from attngap.ops.hybrid.table import CallSetting, CallTable, is_plain, shapes_of
from attngap.ops.native.scratch import Scratch, lay_out
from attngap.ops.native.tensors import Rows, row_bytes
from attngap.ops.uncompiled import plain_tensor

ROWS_LENGTH = Rows._fields.index("length")


class TokenCall(CallTable):
    """One token after the other of the same heads, with the same state and parameters.

    Only a few addresses change from token to token. The state is overwritten.
    """

    def __init__(
        self,
        state: State,
        setting: CallSetting,
        place: Tensor,
        parameters: Mapping[str, Tensor] | None = None,
        position: Tensor | None = None,
        kv_heads: int | None = None,
        held: Tensor | None = None,
    ):
        """`held` (h_kv,) int64 says where in the state a key head is, -1 for key heads that only kept heads read."""
        from attngap.ops.hybrid.kernels_decode import decode

        (b, states, r, dv), d, window = state["S"].shape, state["k"].shape[3], setting.window
        slots, kv = setting.sinks + window, states if kv_heads is None else kv_heads
        shapes = shapes_of(b, len(place), kv, 1, d, dv, r, slots, window)
        for name in ("state_k", "state_v", "state_fk", "S", "z"):
            shapes[name] = (b, states, *shapes[name][2:])
        super().__init__(state["S"].dtype, shapes)
        self.kernel, tables = decode, self.tables
        self.q_at, self.k_at, self.v_at, self.out_at = (self.places[name] for name in ("q", "k", "v", "out"))
        self.state, self.setting, self.place = state, setting, place.contiguous()
        self.position = state["count"] if position is None else position
        self.lanes = b * kv
        self.heads, self.kept = len(place), int(place.max())
        self.scratch, self.length = self._scratch(), 0
        self.out_shape = (len(state["S"]), 1, self.heads, state["S"].shape[3])
        for name, x in state.items():
            if not x.is_contiguous():
                raise AttngapError(f"state[{name!r}] must be contiguous to be overwritten, got strides {x.stride()}")
        self.put("out", state["S"].new_empty(self.out_shape).transpose(1, 2))  # for its layout
        rings = {f"state_{name}": state[name] for name in ("k", "v", "fk") if name in state}
        rings |= {f"state_{name}": state[name][:, None] for name in ("cos", "sin") if name in state}
        for name, x in (rings | {"S": state["S"], "z": state["z"][..., None]} | dict(parameters or {})).items():
            self.put(name, x)
        given = {} if held is None else {"held": _checked(held, kv, states)}
        self.put_setting(setting, count=state["count"], position=self.position, place=self.place, **given)
        self.table[tables.ROOM_AT :] = self.scratch.room
        self.appends, self.moves, self.status = (
            tables.WORDS_AT + getattr(tables.IN, name) for name in ("appends", "moves", "status")
        )

    def _scratch(self) -> Scratch:
        table, k, v = self.tables, self.state["k"], self.state["v"]
        kp, vp, fp, one = row_bytes(k), row_bytes(v), row_bytes(self.state["z"]), native.VECTOR
        sizes = {
            **{"query": table.HEADS * kp, "content": kp, "cosines": kp, "sines": kp},
            **{"fading": fp, "parameters": max(kp, fp), "fk": fp, "fq": table.HEADS * fp},
            **{"row": max(kp, vp), "weights": table.HEADS * table.BLOCK * k.element_size()},
            **{"values": table.BLOCK * vp, "result": table.HEADS * max(kp, vp), "top": one, "norm": one},
        }
        return lay_out(table.Room, sizes)

    def check(self, name: str, x: Tensor) -> None:
        super().check(name, x)
        if name in ("keys", "values") and self.kept >= x.shape[1]:
            raise AttngapError(
                f"place must be below the {x.shape[1]} groups of {name}, got {self.place.tolist()}: give keys of all"
            )

    def put_angles(self, cos: Tensor, sin: Tensor) -> None:
        """The cos and sin of the token's position, (1 or b, 1, w) each."""
        layout = (cos.dtype, cos.shape, cos.stride(), sin.dtype, sin.shape, sin.stride())
        if layout != self.layouts.get("angles") or not (is_plain(cos) and is_plain(sin)):
            cos, sin = plain_tensor("cos", cos), plain_tensor("sin", sin)
            for name, x in (("cos", cos), ("sin", sin)):
                self.put(name, x[:, None].expand(len(self.state["S"]), -1, -1, -1))
            self.check_angles(self.setting, cos)
            self.layouts["angles"] = layout
        self.held["cos"], self.held["sin"] = cos, sin
        self.words[self.places["cos"]], self.words[self.places["sin"]] = cos.data_ptr(), sin.data_ptr()

    def put_cache(self, keys: Tensor, values: Tensor, length: int) -> None:
        """The cache of kept heads, `length` tokens of it: those behind are room."""
        self.put("keys", keys)
        self.put("values", values)
        if not 0 < length <= min(keys.shape[2], values.shape[2]):
            raise AttngapError(
                f"{length} tokens of kept heads do not fit {keys.shape[2]} keys, {values.shape[2]} values"
            )
        self.words[self.places["keys"] + ROWS_LENGTH] = self.words[self.places["values"] + ROWS_LENGTH] = length
        self.length = length

    def put_mask(self, mask: Tensor | None) -> None:
        """(b, 1, 1, n), True where a key may be read; its last column says whether the token is no padding."""
        if mask is None:
            self.words[self.places["real"]] = self.words[self.places["allowed"]] = 0
            return
        mask = mask.expand(len(self.state["S"]), -1, -1, -1)
        self.put("real", mask[..., -1:])
        if self.kept >= 0:
            self.put("allowed", mask.mT)
            self._check_allowed(mask.shape[3])

    def _check_allowed(self, length: int) -> None:
        if length != self.length:
            raise AttngapError(f"the mask is for {length} keys, and kept heads read {self.length}")

    def token(self, q: Tensor, k: Tensor, v: Tensor, *, appends: bool = False) -> Tensor:
        """(b, 1, h, dv). With `appends` the token is written to the end of the cache of kept heads first."""
        layout = (q.dtype, q.shape, q.stride(), k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride())
        plain = is_plain(q) and is_plain(k) and is_plain(v)
        if not plain or layout != self.layouts.get("token"):
            self.put("q", q)
            self.put("k", k)
            self.put("v", v)
            q, k, v = (self.held[name] for name in ("q", "k", "v"))
            self.layouts["token"] = layout if plain else None
        words = self.words
        words[self.q_at], words[self.k_at], words[self.v_at] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        out = pages.empty(self.out_shape, self.dtype, q.device) if self.scratch.guards else q.new_empty(self.out_shape)
        words[self.out_at], words[self.appends] = out.data_ptr(), appends
        self._run(self.lanes * self.heads * k.shape[3] * (self.setting.window + self.length))
        if words[self.status]:
            return self._again(q, k, v, out, appends)
        return out

    def _run(self, work: int) -> None:
        threads = native.thread_count(self.lanes, work)
        self.words[self.moves] = threads == 1
        if threads == 1:
            native.run_alone(self.kernel, (self.address,), self.dtype, self.lanes, self.scratch)
            return
        native.run(self.kernel, (self.address,), self.dtype, self.lanes, work, self.scratch)
        if self.words[self.status] != self.tables.OVERLAPS:
            real = self.held["real"][:, 0, 0, 0] if self.words[self.places["real"]] else 1
            for x in {id(x): x for x in (self.state["count"], self.position)}.values():
                x += real

    def _again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, appends: bool) -> Tensor:
        """The kernel refused to overwrite what it reads, or an output is not finite."""
        status, self.words[self.status] = self.words[self.status], 0
        if status == self.tables.OVERLAPS:
            return self.token(q.clone(), k.clone(), v.clone(), appends=appends)
        given = {name: self.held.get(name) for name in ("fq", "fk", "gain")}
        check_finite({"out": out}, {"q": q, "k": k, "v": v, **given})
        return out


def _checked(held: Tensor, kv_heads: int, states: int) -> Tensor:
    if held.shape != (kv_heads,) or held.dtype != torch.long or int(held.max()) >= states:
        raise AttngapError(
            f"held must be {kv_heads} int64 below the {states} heads of the state, got {held.tolist()} as {held.dtype}"
        )
    return held.contiguous()
