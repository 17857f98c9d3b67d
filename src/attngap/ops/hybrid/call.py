"""The call of the compiled step of decoding: a table of addresses, of which only a few change from token to token."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops import native, pages
from attngap.ops.check import check_finite
from attngap.ops.hybrid.state import State
from attngap.ops.native.scratch import Scratch, lay_out
from attngap.ops.native.tensors import Rows, as_rows, row_bytes
from attngap.ops.uncompiled import plain_tensor

FAR = 2**62  # a position that no token reaches
ROWS_LENGTH = Rows._fields.index("length")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What does not change along a sequence, and how features come about where they are computed by the call."""

    window: int
    sinks: int
    scale: float
    relative: bool
    reach: int = FAR  # from this position on, queries read no features
    turned: int = 0  # pairs of channels that positions turn
    turned_first: int = 0  # the first of these channels
    adjacent: bool = False  # are the channels of a pair neighbors
    angle_step: int = 1  # from one angle to the next in cos and sin
    largest_scale: float = 0.0  # of a query's features, as an exponent
    largest_size: float = 0.0  # of a key's features, as an exponent
    fastest: float = 0.0  # rate of fading
    faded: float = 0.0  # the most that fades, as an exponent


class TokenCall:
    """One token after the other of the same heads, with the same state and parameters.

    A tensor is checked in full when its layout is seen for the first time; after that, that the layout is the same.
    What the table points to is held here, so that no address outlives its memory. The state is overwritten.
    """

    def __init__(
        self,
        state: State,
        setting: Setting,
        place: Tensor,
        parameters: Mapping[str, Tensor] | None = None,
        position: Tensor | None = None,
    ):
        from attngap.ops.hybrid import kernels_call as table
        from attngap.ops.hybrid.kernels_decode import decode

        self.kernel = decode
        self.tables, self.table = table, np.zeros(table.LENGTH, np.int64)
        self.words, self.address = self.table.data, self.table.ctypes.data
        self.layouts: dict[str, Any] = {}
        self.places = {name: len(Rows._fields) * place for name, place in table.AT._asdict().items()}
        self.q_at, self.k_at, self.v_at, self.out_at = (self.places[name] for name in ("q", "k", "v", "out"))
        self.held: dict[str, Tensor] = {}
        self.state, self.setting, self.place = state, setting, place.contiguous()
        self.position = state["count"] if position is None else position
        self.dtype, self.lanes = state["S"].dtype, state["S"].shape[0] * state["S"].shape[1]
        self.heads, self.kept = len(place), int(place.max())
        self.shapes = self._shapes()
        self.scratch, self.length = self._scratch(), 0
        self.out_shape = (len(state["S"]), 1, self.heads, state["S"].shape[3])
        for name, x in state.items():
            if not x.is_contiguous():
                raise AttngapError(f"state[{name!r}] must be contiguous to be overwritten, got strides {x.stride()}")
        self.put("out", state["S"].new_empty(self.out_shape).transpose(1, 2))  # for its layout
        rings = {f"state_{name}": state[name] for name in ("k", "v", "fk")}
        for name, x in (rings | {"S": state["S"], "z": state["z"][..., None]} | dict(parameters or {})).items():
            self.put(name, x)
        self._put_words()
        self.appends, self.moves, self.status = (
            table.WORDS_AT + getattr(table.IN, name) for name in ("appends", "moves", "status")
        )

    def _shapes(self) -> dict[str, tuple[int | None, ...]]:
        """What each tensor must be; None is any size."""
        (b, kv, r, dv), h, d = self.state["S"].shape, self.heads, self.state["k"].shape[3]
        slots, window, groups = self.setting.sinks + self.setting.window, self.setting.window, None
        state = {"k": (b, kv, slots, d), "v": (b, kv, slots, dv), "fk": (b, kv, window, r)}
        return {
            **{f"state_{name}": size for name, size in state.items()},
            **{"S": (b, kv, r, dv), "z": (b, kv, r, 1)},
            **{"q": (b, h, 1, d), "k": (b, kv, 1, d), "v": (b, kv, 1, dv), "out": (b, h, 1, dv)},
            **{"cos": (b, 1, 1, None), "sin": (b, 1, 1, None), "real": (b, 1, 1, 1), "allowed": (b, 1, None, 1)},
            **{"keys": (b, groups, None, d), "values": (b, groups, None, dv)},
            **{"fq": (b, h, 1, r), "fk": (b, kv, 1, r), "gain": (b, h, 1, 1)},
            **{"query_weight": (1, h, d, r), "query_bias": (1, h, 1, r), "query_scale": (1, h, 1, r)},
            **{"key_weight": (1, kv, d, r), "key_bias": (1, kv, 1, r), "log_rate": (1, kv, 1, r)},
            **{"log_gain": (1, h, 1, 1), "gain_weight": (1, h, 1, d)},
        }

    def _scratch(self) -> Scratch:
        table, k, v, fk = self.tables, self.state["k"], self.state["v"], self.state["fk"]
        kp, vp, fp, one = row_bytes(k), row_bytes(v), row_bytes(fk), native.VECTOR
        sizes = {
            **{"query": table.HEADS * kp, "content": kp, "cosines": kp, "sines": kp},
            **{"fading": fp, "parameters": max(kp, fp), "fk": fp, "fq": table.HEADS * fp},
            **{"row": max(kp, vp), "weights": table.HEADS * table.BLOCK * k.element_size()},
            **{"values": table.BLOCK * vp, "result": table.HEADS * max(kp, vp), "top": one, "norm": one},
        }
        return lay_out(table.Room, sizes)

    def _put_words(self) -> None:
        table, numbers = self.tables, self.table.view(np.float64)
        addresses = {"count": self.state["count"], "position": self.position, "place": self.place}
        given = dataclasses.asdict(self.setting) | {name: x.data_ptr() for name, x in addresses.items()}
        for name, value in given.items():
            at = table.WORDS_AT + getattr(table.IN, name)
            if isinstance(value, float):
                numbers[at] = value
            else:
                self.words[at] = int(value)
        self.table[table.ROOM_AT :] = self.scratch.room

    def put(self, name: str, x: Tensor) -> None:
        """Where one of the call's tensors is now."""
        if not _is_plain(x):
            x = plain_tensor(name, x)
        layout, address = (x.dtype, x.shape, x.stride(), x.is_cpu), x.data_ptr()
        if self.layouts.get(name) != layout or not address:
            self._describe(name, x)
            self.layouts[name] = layout
        self.words[self.places[name]] = address
        self.held[name] = x

    def _describe(self, name: str, x: Tensor) -> None:
        size = self.shapes[name]
        if x.ndim != 4 or any(want not in (None, got) for want, got in zip(size, x.shape, strict=True)):
            words = str(size).replace("None", "any")
            raise AttngapError(f"{name} must be {words} for one token of these heads, got {tuple(x.shape)}")
        dtype = torch.bool if name in ("real", "allowed") else self.dtype
        if x.dtype != dtype:
            raise AttngapError(f"{name} must be {dtype} for a state of {self.dtype}, got {x.dtype}")
        if name in ("keys", "values") and self.kept >= x.shape[1]:
            raise AttngapError(
                f"place must be below the {x.shape[1]} groups of {name}, got {self.place.tolist()}: give keys of all"
            )
        at = self.places[name]
        self.table[at : at + len(Rows._fields)] = as_rows(x)[0]

    def put_angles(self, cos: Tensor, sin: Tensor) -> None:
        """The cos and sin of the token's position, (1 or b, 1, w) each."""
        layout = (cos.dtype, cos.shape, cos.stride(), sin.dtype, sin.shape, sin.stride())
        if layout != self.layouts.get("angles") or not (_is_plain(cos) and _is_plain(sin)):
            cos, sin = plain_tensor("cos", cos), plain_tensor("sin", sin)
            for name, x in (("cos", cos), ("sin", sin)):
                self.put(name, x[:, None].expand(len(self.state["S"]), -1, -1, -1))
            if (self.setting.turned - 1) * self.setting.angle_step >= cos.shape[-1]:
                raise AttngapError(f"cos and sin must hold {self.setting.turned} angles, got {tuple(cos.shape)}")
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
        plain = _is_plain(q) and _is_plain(k) and _is_plain(v)
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
        threads = 1 if work < native.ALONE else native.thread_count(self.lanes, work)
        self.words[self.moves] = threads == 1
        if threads == 1:
            native.run_alone(self.kernel, self.address, self.dtype, self.lanes, self.scratch)
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


def _is_plain(x: Tensor) -> bool:
    """Memory of its own on the CPU, for which `plain_tensor` has nothing to do."""
    return type(x) is Tensor and x.is_cpu and not x.is_neg() and x.data_ptr() != 0
