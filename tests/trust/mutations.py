"""Files that are damaged in the ways files get damaged, and in some that only an enemy would think of."""

import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 10**9, 1e308, -0.5, "", "x", "no", "../..", "\x00", [], {}, [[]], {"x": None}, [None] * 3,
)  # fmt: skip
DEEP = "[" * 100_000


def mutate(data: bytes, draw: random.Random) -> bytes:
    """One damaged version of a file's bytes."""
    ways = [_flip, _cut, _insert, _truncate, _repeat]
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if content is not None:
        ways += [_value] * 8 + [_deep, _encoding]
    return draw.choice(ways)(data, draw)


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data or b" ")
    for _ in range(draw.choice((1, 1, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[:start] + data[start + draw.randrange(64) :]


def _insert(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[:start] + draw.randbytes(draw.randrange(1, 32)) + data[start:]


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[:start] + data[start : start + 200] + data[start:]


def _deep(data: bytes, draw: random.Random) -> bytes:
    return DEEP.encode() if draw.random() < 0.5 else b'{"schema":' + DEEP.encode()


def _encoding(data: bytes, draw: random.Random) -> bytes:
    return data.decode(errors="replace").encode(draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))


def _value(data: bytes, draw: random.Random) -> bytes:
    """Another value, or none, somewhere inside."""
    content = json.loads(data)
    places = list(_places(content))
    if not places:
        return b"null"
    holder, key = draw.choice(places)
    if draw.random() < 0.25:
        del holder[key]
    else:
        holder[key] = draw.choice(ODD)
    return json.dumps(content).encode()


def _places(content: Any):
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from _places(content[key])
