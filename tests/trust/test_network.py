"""No connection outside of this machine: every verb on a model that is a folder here, with all sockets heard."""

import sys

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError
from tests.conversion.small import TEXT
from tests.zoo import tiny, tokenizer

HEARD: list[str] = []
LISTENING: list[bool] = []
LOCAL = ("127.0.0.1", "::1", "localhost", None)
QUICK = ("--context", "64", "--tokens", "448", "--steps", "2", "--joint", "0", "--rounds", "1", "--window", "8")
SIZES = ("model.width=8", "model.heads=1", "model.layers=1", "task.items=3")
SIZES += ("train.steps=3", "train.batch=4", "train.validation=4", "train.test=4")
TINY = ["--learning-rates", "4e-3", *(word for size in SIZES for word in ("--set", size))]


def hear(event: str, args: tuple) -> None:
    if not LISTENING or event not in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        return
    address = args[0] if event == "socket.getaddrinfo" else args[1]
    host = address[0] if isinstance(address, tuple) else address
    if host not in LOCAL and not str(host).startswith("/"):  # a path is a socket of this machine
        HEARD.append(f"{event} {host}")


sys.addaudithook(hear)  # cannot be taken back: it hears only while LISTENING


@pytest.fixture
def listening():
    HEARD.clear()
    LISTENING.append(True)
    yield HEARD
    LISTENING.clear()


@pytest.mark.filterwarnings("ignore")
def test_no_verb_asks_anybody(tmp_path, listening, monkeypatch):
    model = tmp_path / "model"
    tiny().save_pretrained(model)
    tokenizer().save_pretrained(model)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = {name: str(tmp_path / name) for name in ("diagnosis", "plan.json", "fast", "runs.db", "report.html")}
    monkeypatch.chdir(tmp_path)
    for words in (
        ["mechanisms"],
        ["theory", "law", "--n", "1e4", "--d", "66", "--a1", "0.7", "--a0", "0.05", "--b", "0.5", "--m", "20"],
        ["diagnose", "model", "--text", "text.txt", "--context", "64", "--ranks", "8", "-o", out["diagnosis"]],
        ["plan", out["diagnosis"], "--keep", "0.25", "-o", out["plan.json"]],
        ["linearize", "model", "--text", "text.txt", *QUICK, "--no-measure", "-o", out["fast"]],
        ["generate", out["fast"], "the cat", "--tokens", "3"],
        ["chat", out["fast"], "--tokens", "2"],
        ["eval", out["fast"], "--suite", "needle", "--lengths", "250", "--examples", "1"],
        ["bench", out["fast"], "--contexts", "40", "--prompts", "30"],
        ["probe", "run", "copy", "-m", "elu", "--seeds", "1", "--db", out["runs.db"], *TINY],
        ["report", out["fast"], out["diagnosis"], "-o", out["report.html"]],
    ):
        done = CliRunner().invoke(app, words, input="the cat\n/quit\n")
        assert done.exit_code == 0, (words, done.exception, done.output)
    assert listening == []


def test_what_looks_like_a_path_is_never_asked_for(listening):
    import attngap

    for name in ("./nowhere", "../x/y", "/no/such/folder", "a/b/c", "~/nothing", "x.gguf"):
        with pytest.raises(AttngapError):
            attngap.load(name)
    assert listening == []


def test_a_question_is_heard(listening):
    import socket

    with socket.socket() as asking:
        asking.settimeout(0.01)
        asking.connect_ex(("192.0.2.1", 9))  # an address that documents use and nobody has
    assert listening == ["socket.connect 192.0.2.1"]
