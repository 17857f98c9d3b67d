"""How far a kernel lifts the needle above every other key: the one number the separation law needs from it."""

import decimal
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from attngap.errors import AttngapError, unknown

Number = float | int
Kernel = str | tuple[str, Number]
NAMES = ("softmax", "linear", "polynomial", "tilted")
DIGITS = 80  # a threshold at n = 1e15 keeps 60 digits behind the point, so ties are recognized


@contextmanager
def precise() -> Iterator[None]:
    """Decimal arithmetic wide enough that no n, scale or degree loses the threshold's fraction."""
    with decimal.localcontext(decimal.Context(prec=DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)):
        yield


def exact(x: float | int) -> Decimal:
    """The decimal a float prints as: 0.1 means one tenth."""
    return Decimal(repr(float(x))) if isinstance(x, float) else Decimal(x)


def parse(text: str) -> Kernel:
    """`softmax`, `linear`, `polynomial:4` or `tilted:2`, as the command line writes them."""
    name, _, number = text.partition(":")
    if not number:
        return check(name)
    try:
        return check((name, float(number)))
    except ValueError as error:
        if isinstance(error, AttngapError):
            raise
        raise AttngapError(f"kernel: the part after ':' must be a number, got {text!r}. Try polynomial:4") from None


def check(kernel: Any) -> Kernel:
    """The kernel itself if it is one. `tilted` is linear attention with the weight X_E of `ratio`."""
    name, *number = kernel if isinstance(kernel, tuple) else (kernel,)
    if name not in NAMES:
        raise unknown("kernel", name, NAMES)
    if name in ("softmax", "linear"):
        if number:
            raise AttngapError(f"kernel {name!r} takes no number, got {number[0]}")
        return name
    if len(number) != 1 or not 0 < number[0] < float("inf"):
        what = "degree" if name == "polynomial" else "constant E"
        raise AttngapError(f"kernel {name!r} needs a positive {what}, as {name}:2 or ({name!r}, 2); got {kernel!r}")
    return name, number[0]


def spell(kernel: Kernel) -> str:
    return kernel if isinstance(kernel, str) else f"{kernel[0]}:{kernel[1]:g}"


@functools.lru_cache(maxsize=256)
def _log(n: int) -> Decimal:
    with precise():
        return Decimal(n).ln()


def ratio(kernel: Kernel, n: int, scale: Number, needle: Number, query: Number) -> Decimal:
    """(kernel value at the needle) / (at any other key), for a query row whose own needle entry is `query`.

    Scores are s L (1 + query) times 1 + needle at the needle and 1 elsewhere, L = log n:

    softmax        n^(s a (1 + query))
    polynomial k   (1 + a)^k, whatever s and the query are; linear is k = 1
    tilted E       1 + a n / E: linear attention with X_E = 1 (e_1 + (E / (n c)) e_d)^T instead of all ones
    """
    a = exact(needle)
    if kernel == "softmax":
        return (exact(scale) * a * (1 + exact(query)) * _log(n)).exp()
    if kernel == "linear":
        return 1 + a
    number = float(kernel[1])
    if kernel[0] == "tilted":
        return 1 + a * n / exact(number)
    return (1 + a) ** (int(number) if number.is_integer() else exact(number))
