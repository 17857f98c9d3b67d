"""What every op asks of its arguments before it computes, and of its result after: one line a mistake."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attngap.errors import AttngapError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums and states are kept in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shape(x: Tensor) -> str:
    return f"({', '.join(str(size) for size in x.shape)})"


def check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
    """q (b, h, t, r), k (b, h_kv, t, r), v (b, h_kv, t, dv), h a multiple of h_kv; mask (b, t), True at real tokens."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise AttngapError(f"{name} must have four axes (batch, heads, time, width), got {shape(x)}")
        if x.numel() == 0:
            raise AttngapError(f"{name} is empty: got {shape(x)}, every axis must be at least 1")
    check_alike(q, k=k, v=v)
    for name, x in (("k", k), ("v", v)):
        if (x.shape[0], x.shape[2]) != (q.shape[0], q.shape[2]):
            raise AttngapError(f"{name} must have the batch and time of q {shape(q)}, got {shape(x)}")
    if k.shape[1] != v.shape[1]:
        raise AttngapError(f"k and v must have the same heads, got {k.shape[1]} and {v.shape[1]}")
    if q.shape[1] % k.shape[1]:
        raise AttngapError(f"the heads of q must be a multiple of those of k and v, got {q.shape[1]} and {k.shape[1]}")
    check_width("k", k, q.shape[3], "q")
    if mask is not None:
        check_mask(mask, q)


def check_alike(q: Tensor, **others: Tensor | None) -> None:
    """Every tensor has q's dtype, one the ops compute in, and lives on q's device."""
    if q.dtype not in DTYPES:
        allowed = ", ".join(_plain(dtype) for dtype in DTYPES)
        raise AttngapError(f"q has dtype {_plain(q.dtype)}; allowed: {allowed}")
    for name, x in others.items():
        if x is None:
            continue
        if x.dtype != q.dtype:
            raise AttngapError(f"{name} has dtype {_plain(x.dtype)} but q has {_plain(q.dtype)}: convert one of them")
        check_device(name, x, q)


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise AttngapError(f"{name} is on {x.device} but q is on {q.device}: move one of them")


def check_width(name: str, x: Tensor, width: int, like: str) -> None:
    if x.shape[-1] != width:
        raise AttngapError(f"{name} must have width {width} like {like}, got {x.shape[-1]}")


def check_mask(mask: Tensor, q: Tensor) -> None:
    if mask.shape != (q.shape[0], q.shape[2]):
        raise AttngapError(f"mask must be (batch, time) = ({q.shape[0]}, {q.shape[2]}), got {shape(mask)}")
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        # An additive mask of 0 and -inf read as True and False would be silently inverted.
        raise AttngapError(f"mask must be bool or integer, True at real tokens, got {_plain(mask.dtype)}")
    check_device("mask", mask, q)


def check_count(name: str, value: object, least: int) -> None:
    """A whole number, at least `least`; None where an option is not used."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise AttngapError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if value < least:
        raise AttngapError(f"{name} must be at least {least}, got {value}")


def check_gate(name: str, gate: Tensor, q: Tensor, k: Tensor, *, vector: bool) -> None:
    """A gate is (b, heads, t), where `vector` also (b, heads, t, r), with the heads of q or of k."""
    b, h, t, r = q.shape
    heads = sorted({h, k.shape[1]}, reverse=True)
    allowed = [(b, n, t) for n in heads] + ([(b, n, t, r) for n in heads] if vector else [])
    if tuple(gate.shape) not in allowed:
        raise AttngapError(f"{name} must be {' or '.join(str(s) for s in allowed)}, got {shape(gate)}")
    if gate.dtype not in (q.dtype, accumulate_dtype(q.dtype)):
        names = dict.fromkeys((_plain(q.dtype), _plain(accumulate_dtype(q.dtype))))
        raise AttngapError(f"{name} has dtype {_plain(gate.dtype)}; allowed with this q: {', '.join(names)}")
    check_device(name, gate, q)


def check_log_decay(log_decay: Tensor, q: Tensor, k: Tensor) -> None:
    """Log-space gates: finite, at most 0."""
    check_gate("log_decay", log_decay, q, k, vector=True)
    low, high = (x.item() for x in torch.aminmax(log_decay.detach()))
    if not (low > -torch.inf and high <= 0):
        raise AttngapError(f"log_decay must be finite and at most 0 (it is a logarithm), got values in [{low}, {high}]")


def check_state(state: Mapping[str, Tensor], widths: Mapping[str, tuple[int, ...]], q: Tensor, k: Tensor) -> None:
    """`widths` maps each name to the axes after (batch, heads); the heads are those of q or of k."""
    if set(state) != set(widths):
        raise AttngapError(f"state must hold {', '.join(widths)}, got {', '.join(state) or 'nothing'}")
    want = _plain(accumulate_dtype(q.dtype))
    for name, width in widths.items():
        x, heads = state[name], sorted({q.shape[1], k.shape[1]}, reverse=True)
        allowed = [(q.shape[0], n, *width) for n in heads]
        if tuple(x.shape) not in allowed:
            raise AttngapError(f"state[{name!r}] must be {' or '.join(map(str, allowed))}, got {shape(x)}")
        if _plain(x.dtype) != want:
            raise AttngapError(f"state[{name!r}] must be {want} for {_plain(q.dtype)} inputs, got {_plain(x.dtype)}")
        check_device(f"state[{name!r}]", x, q)


def check_finite(results: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]) -> None:
    """After computing: name the input that held NaN or infinity, or say that finite inputs overflowed.

    A sum costs one pass and is not finite if any element is not; the inputs are looked at only then.
    """
    if all(bool(torch.isfinite(x.detach().sum())) for x in results.values()):
        return
    if all(bool(torch.isfinite(x.detach()).all()) for x in results.values()):
        return  # only the sum overflowed
    for name, x in inputs.items():
        if x is not None and not bool(torch.isfinite(x.detach()).all()):
            kind = "NaN" if bool(torch.isnan(x.detach()).any()) else "infinite values"
            raise AttngapError(f"{name} holds {kind}; every input must be finite")
    largest = ", ".join(
        f"|{name}| <= {x.detach().abs().max().item():.3g}" for name, x in inputs.items() if x is not None
    )
    raise AttngapError(f"the result overflowed although the inputs are finite ({largest}): scale them down")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
