"""The names `mechanism` takes: ours, listed below, and those other packages register."""

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.options import build
from attngap.mechanisms.variants.cosformer import Cosformer
from attngap.mechanisms.variants.delta import Delta
from attngap.mechanisms.variants.elu import Elu
from attngap.mechanisms.variants.favor import Favor
from attngap.mechanisms.variants.gated_delta import GatedDelta
from attngap.mechanisms.variants.gla import Gla
from attngap.mechanisms.variants.hedgehog import Hedgehog
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.mechanisms.variants.inline import Inline
from attngap.mechanisms.variants.kda import Kda
from attngap.mechanisms.variants.linear import Linear
from attngap.mechanisms.variants.mala import Mala
from attngap.mechanisms.variants.polynomial import Polynomial
from attngap.mechanisms.variants.prototype import Prototype
from attngap.mechanisms.variants.relu import Relu
from attngap.mechanisms.variants.retention import Retention
from attngap.mechanisms.variants.rff import Rff
from attngap.mechanisms.variants.softmax import Softmax
from attngap.mechanisms.variants.ssd import Ssd
from attngap.mechanisms.variants.taylor import Taylor

MECHANISMS: tuple[type[Mechanism], ...] = (
    Softmax,
    Linear,
    Elu,
    Relu,
    Polynomial,
    Taylor,
    Favor,
    Rff,
    Cosformer,
    Hedgehog,
    Prototype,
    Inline,
    Mala,
    Retention,
    Gla,
    Ssd,
    Delta,
    GatedDelta,
    Kda,
    Hybrid,
)
GROUP = "attngap.mechanisms"


def catalogue() -> tuple[str, ...]:
    """The names `mechanism` takes: the built-in ones, then those of installed packages."""
    return tuple(cls.name for cls in MECHANISMS) + tuple(plugins())


def mechanism(name: str, heads: int, dim: int, value_dim: int | None = None, **options: Any) -> Mechanism:
    """A new mechanism of that name; `options` are those of its constructor.

    >>> mechanism("polynomial", heads=2, dim=8, degree=3).state_rank(1000)
    120
    """
    return build(mechanism_class(name), name, (heads, dim, value_dim), options)


def mechanism_class(name: str) -> type[Mechanism]:
    """The class behind a name, built in or from the entry-point group `attngap.mechanisms`."""
    for cls in MECHANISMS:
        if cls.name == name:
            return cls
    found = plugins()
    if name in found:
        return _load(found[name])
    raise unknown("mechanism", name, catalogue(), "List them: attngap mechanisms")


@functools.cache
def plugins() -> dict[str, EntryPoint]:
    """Entry points of other packages by name. A built-in name cannot be taken over."""
    own = {cls.name for cls in MECHANISMS}
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in own}


def _load(point: EntryPoint) -> type[Mechanism]:
    """Import a plugin only when it is asked for, so that a broken one harms nobody else."""
    try:
        cls = point.load()
    except Exception as error:
        raise AttngapError(
            f"Mechanism {point.name!r} comes from {point.value}, which failed to load: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Mechanism)):
        raise AttngapError(f"Mechanism {point.name!r} comes from {point.value}, which is not a Mechanism: {cls!r}")
    return cls
