"""The table of addresses that tells a compiled call of hybrid heads all it needs (`kernels_call` says how it lies)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops.native.tensors import Rows, as_rows
from attngap.ops.uncompiled import plain_tensor

FAR = 2**62  # a position that no token reaches


@dataclasses.dataclass(frozen=True)
class CallSetting:
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


class CallTable:
    """A table, with the tensors that it points to, so that no address outlives its memory.

    A tensor is checked in full when its layout is seen for the first time; after that, that the layout is the same.
    """

    def __init__(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int | None, ...]]):
        from attngap.ops.hybrid import kernels_call as tables

        self.dtype, self.shapes = dtype, shapes
        self.tables, self.table = tables, np.zeros(tables.LENGTH, np.int64)
        self.words, self.address = self.table.data, self.table.ctypes.data
        self.layouts: dict[str, Any] = {}
        self.held: dict[str, Tensor] = {}
        self.places = {name: len(Rows._fields) * place for name, place in tables.AT._asdict().items()}

    def put(self, name: str, x: Tensor) -> None:
        """Where one of the call's tensors is now."""
        if not is_plain(x):
            x = plain_tensor(name, x)
        layout, address = (x.dtype, x.shape, x.stride(), x.is_cpu), x.data_ptr()
        if self.layouts.get(name) != layout or not address:
            self.check(name, x)
            at = self.places[name]
            self.table[at : at + len(Rows._fields)] = as_rows(x)[0]
            self.layouts[name] = layout
        self.words[self.places[name]] = address
        self.held[name] = x

    def check(self, name: str, x: Tensor) -> None:
        """Refuse what is not of the shape and type that the call reads."""
        size = self.shapes[name]
        if x.ndim != 4 or any(want not in (None, got) for want, got in zip(size, x.shape, strict=True)):
            words = str(size).replace("None", "any")
            raise AttngapError(f"{name} must be {words} for these heads, got {tuple(x.shape)}")
        dtype = torch.bool if name in ("real", "allowed") else self.dtype
        if x.dtype != dtype:
            raise AttngapError(f"{name} must be {dtype} for a state of {self.dtype}, got {x.dtype}")

    def put_setting(self, setting: CallSetting, **addresses: Tensor) -> None:
        """What does not change, and where counts and places are."""
        numbers = self.table.view(np.float64)
        self.held |= addresses
        given = vars(setting) | {name: x.data_ptr() for name, x in addresses.items()}
        for name, value in given.items():
            at = self.tables.WORDS_AT + getattr(self.tables.IN, name)
            if isinstance(value, float):
                numbers[at] = value
            else:
                self.words[at] = int(value)

    def check_angles(self, setting: CallSetting, cos: Tensor) -> None:
        """Refuse cos and sin that hold fewer angles than are turned."""
        if (setting.turned - 1) * setting.angle_step >= cos.shape[-1]:
            raise AttngapError(f"cos and sin must hold {setting.turned} angles, got {tuple(cos.shape)}")


def shapes_of(
    b: int, h: int, kv: int, t: int, d: int, dv: int, r: int, slots: int, window: int
) -> dict[str, tuple[int | None, ...]]:
    """What each tensor of a call over t tokens must be; None is any size."""
    return {
        **{"state_k": (b, kv, slots, d), "state_v": (b, kv, slots, dv), "state_fk": (b, kv, window, r)},
        **{"state_cos": (b, 1, window + 1, None), "state_sin": (b, 1, window + 1, None)},
        **{"S": (b, kv, r, dv), "z": (b, kv, r, 1)},
        **{"q": (b, h, t, d), "k": (b, kv, t, d), "v": (b, kv, t, dv), "out": (b, h, t, dv)},
        **{"cos": (b, 1, t, None), "sin": (b, 1, t, None), "real": (b, 1, t, 1), "allowed": (b, 1, None, 1)},
        **{"keys": (b, None, None, d), "values": (b, None, None, dv)},
        **{"fq": (b, h, t, r), "fk": (b, kv, t, r), "gain": (b, h, t, 1)},
        **{"query_weight": (1, h, d, r), "query_bias": (1, h, 1, r), "query_scale": (1, h, 1, r)},
        **{"key_weight": (1, kv, d, r), "key_bias": (1, kv, 1, r), "log_rate": (1, kv, 1, r)},
        **{"log_gain": (1, h, 1, 1), "gain_weight": (1, h, 1, d)},
    }


def is_plain(x: Tensor) -> bool:
    """Memory of its own on the CPU, for which `plain_tensor` has nothing to do."""
    return type(x) is Tensor and x.is_cpu and not x.is_neg() and x.data_ptr() != 0
