"""Odd requests to the explorer: each has an answer, quickly, and none is an error of the server."""

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from attngap.explorer.app import create
from attngap.explorer.sentence import Sentences
from attngap.mechanisms.catalogue import catalogue
from tests import made_up
from tests.trust.damage import SECONDS, in_time
from tests.trust.outcome import Outcome
from tests.zoo import tiny, tokenizer

ODD = (
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "-0.0",
    "1e400",
    "1e-400",
    "9" * 400,
    "true",
    "null",
    "None",
    "[]",
    "{}",
)
ODD += ("\x00", "\u202e", "😀", "\ud7ff\ufffe", "../../etc/passwd", "%2e%2e%2f", "<script>alert(1)</script>", "[/red]")
ODD += ("x" * 5_000, "a\r\nSet-Cookie: b=c", "=1+1", "' OR 1=1 --", "0x10", "1_000", "\N{ARABIC-INDIC DIGIT ONE}")
LAW = {"log10_n": 6, "d": 514, "needle": 0.7, "a0": 0.05, "b": 0.5, "scale": 1, "m": 40, "degree": 4}
WEIGHTS = {"name": "elu", "tokens": 24, "sharpness": 2, "data": "needle", "seed": 3}
TEXT = {"text": "the cat sat"}
ROUTES: dict[str, dict[str, Any]] = {
    "/": {},
    "/api/law": LAW,
    "/api/law/curve": LAW,
    "/api/weights": WEIGHTS,
    "/api/sentence": TEXT,
    "/api/sentence/{}/{}": TEXT,
    "/api/choice": {"kept": 3},
    "/api/results": {},
    "/report/{}": {},
    "/{}": {},
}
SAID: dict[str, Any] = {"original": [{"role": "user", "content": "the cat"}]}
BODIES = (None, [], {}, "x", SAID, {"original": []}, {"": [{}]}, {"original": [{"role": "x"}]}, {"original": None})
BODIES += ({"nobody": [{"role": "user", "content": "x"}]}, {"original": [{"role": "system", "content": ""}] * 3})


@functools.cache
def client() -> TestClient:
    """Of an explorer with a model, a diagnosis, a plan and runs; an error of the server is raised here."""
    folder = Path(tempfile.mkdtemp(prefix="attngap-trust-"))
    made_up.diagnosis(folder / "diagnosis", layers=2, heads=4, side=8)
    made_up.plan(folder / "plan.json", layers=2, heads=4)
    made_up.runs(folder / "runs.sqlite")
    return TestClient(create([folder], Sentences(tiny(), tokenizer(), "tiny")), base_url="http://127.0.0.1")


def batch(number: int, requests: int = 200) -> Outcome:
    """Requests with something odd in most of them."""
    outcome, draw = Outcome(), random.Random(f"requests {number}")
    for _ in range(requests):
        route = draw.choice((*ROUTES, "/api/chat"))
        asked = _chat(draw) if route == "/api/chat" else _get(route, draw)
        outcome.count(route)
        if wrong := _wrong(asked):
            outcome.faults.append(f"{asked}: {wrong}")
    return outcome


def _get(route: str, draw: random.Random) -> dict[str, Any]:
    params = dict(ROUTES[route])
    if route == "/api/weights":
        params["name"] = draw.choice(catalogue())
    for name in draw.sample(sorted(params), min(len(params), draw.choice((0, 1, 1, 2)))):
        params[name] = draw.choice(ODD)
    if params and draw.random() < 0.1:
        params.pop(draw.choice(sorted(params)))
    path = route.format(*(draw.choice((0, 1, 3, 99, -1, 2**70, *ODD)) for _ in range(route.count("{}"))))
    method = draw.choice(("GET",) * 8 + ("POST", "PUT", "DELETE", "HEAD"))
    host = draw.choice(("127.0.0.1",) * 8 + ("evil.example", "", "[::1]:80", "127.0.0.1:99999999", "a" * 300))
    return {"method": method, "url": path, "params": params, "headers": {"host": host}}


def _chat(draw: random.Random) -> dict[str, Any]:
    body = draw.choice(BODIES)
    if body is SAID and draw.random() < 0.7:
        body = {"original": [{"role": draw.choice(("user", *ODD)), "content": draw.choice(ODD)}]}
    asked: dict[str, Any] = {"method": "POST", "url": "/api/chat", "params": {"tokens": draw.choice((2, *ODD))}}
    if draw.random() < 0.2:
        return asked | {"content": draw.choice((b"", b"{", b"[" * 50_000, b"\xff\xfe", b'{"original": ' * 2_000))}
    return asked | {"json": body}


def _wrong(asked: dict[str, Any]) -> str | None:
    try:
        with in_time(SECONDS):
            answer = client().request(**asked)
    except Exception as error:
        if type(error).__name__ == "InvalidURL":  # it never left the client
            return None
        return f"{type(error).__name__}: {str(error)[:200]}"
    if answer.status_code >= 500:
        return f"status {answer.status_code}"
    return None
