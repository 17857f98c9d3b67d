"""Mechanisms by text: `elu`, `polynomial:degree=3`, and one a layer as in `gla+softmax`."""

import dataclasses
from typing import Any

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import mechanism, mechanism_class
from attngap.probes.model import Make, ModelOptions

LARGEST = 512  # head_dim beyond which no match of states is looked for
TOLERANCE = 0.25  # how far from the state asked for the nearest head_dim may be


def parse(text: str) -> list[Make]:
    """Makers of the mechanisms named in `text`, one for all layers or one each.

    >>> len(parse("gla+softmax")), len(parse("polynomial:degree=3"))
    (2, 1)
    """
    return [_maker(part.strip()) for part in text.split("+")]


def _maker(text: str) -> Make:
    name, *settings = text.split(":")
    cls = mechanism_class(name)
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise AttngapError(f"Mechanism {text!r}: {setting!r} is not option=value. Example: polynomial:degree=3")
        options[key] = read_value(value)

    def make(sizes: ModelOptions) -> Mechanism:
        gates = {"model_dim": sizes.width} if cls.gated else {}
        return mechanism(name, sizes.heads, sizes.key_dim, sizes.value_dim, **{**gates, **options})

    return make


def read_value(text: str) -> Any:
    """A number, true or false where the text is one, else the text.

    >>> [read_value(text) for text in ("3", "1e-3", "true", "rotary")]
    [3, 0.001, True, 'rotary']
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def match_state(text: str, sizes: ModelOptions, tokens: int, floats: int) -> ModelOptions:
    """The same model with the head_dim whose state comes nearest to `floats`, all heads and layers together.

    Softmax, whose state is as long as the sequence, is left as it is: there is no size to match.
    """
    makes = parse(text)
    makes = makes * (sizes.layers if len(makes) == 1 else 1)

    def state(dim: int, t: int) -> int:
        trial = dataclasses.replace(sizes, head_dim=dim)
        built = [make(trial) for make in makes]
        return sum(mixer.kv_heads * mixer.state_floats(t) for mixer in built)

    if state(sizes.key_dim, tokens) != state(sizes.key_dim, 2 * tokens):
        return sizes
    step = 2  # rotary positions and paired features need even widths
    low, high = 1, LARGEST // step
    while low < high:  # the first width that reaches it; states grow with the width
        middle = (low + high) // 2
        low, high = (low, middle) if state(step * middle, tokens) >= floats else (middle + 1, high)
    best = min((step * n for n in (low - 1, low) if n), key=lambda dim: abs(state(dim, tokens) - floats))
    got = state(best, tokens)
    if abs(got - floats) > TOLERANCE * floats:
        raise AttngapError(
            f"{text}: no head_dim brings its state near {floats} floats; the nearest is {best} with {got}. "
            "Ask for another state, or change width, heads and layers"
        )
    return dataclasses.replace(sizes, head_dim=best)
