"""--dtype and --device on every verb that loads a model; what is not there is refused before anything is written."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError
from tests.zoo import tiny, tokenizer

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("placement")
    tiny().save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    (root / "text.txt").write_text(" ".join(f"{i} green bottles hanging on the wall." for i in range(500)))
    return root


def verbs(place, out):
    model = str(place / "model")
    return {
        "diagnose": ["diagnose", model, "-o", str(out), "--quick"],
        "linearize": ["linearize", model, "-o", str(out)],
        "generate": ["generate", model, "hello"],
        "chat": ["chat", model],
        "eval": ["eval", model, "--suite", "needle"],
        "serve": ["serve", "--model", model, "--port", "0"],
    }


@pytest.mark.parametrize("verb", ["diagnose", "linearize", "generate", "chat", "eval", "serve"])
@pytest.mark.parametrize(
    ("option", "line"), [(("--device", "cuda:99"), "No device 'cuda:99'"), (("--dtype", "int3"), "No dtype 'int3'")]
)
def test_what_is_not_there_is_told_before_work_starts(place, tmp_path, verb, option, line):
    done = RUNNER.invoke(app, [*verbs(place, tmp_path / "out")[verb], *option])
    assert isinstance(done.exception, AttngapError)
    assert str(done.exception).startswith(line)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [["run", "copy", "-m", "elu"], ["run", "copy", "--model", "{model}"], ["sweep", "{sweep}"]]
)
def test_a_probe_on_a_device_that_is_not_there(place, tmp_path, words):
    sweep = tmp_path / "sweep.toml"
    sweep.write_text('name = "s"\n[[grid]]\ntasks = ["copy"]\nmechanisms = ["elu"]\n')
    places = {"model": place / "model", "sweep": sweep}
    words = ["probe", *(word.format(**places) for word in words), "--db", str(tmp_path / "runs.db")]
    for more, line in {
        ("--device", "cuda:99"): "No device 'cuda:99'",
        ("--device", "tpu"): "No device 'tpu'. Allowed: cpu, cuda, cuda:1, mps, auto",
    }.items():
        done = RUNNER.invoke(app, [*words, *more])
        assert isinstance(done.exception, AttngapError)
        assert str(done.exception).startswith(line)
        assert "\n" not in str(done.exception)
    assert not (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("verb", ["diagnose", "probe"])
def test_a_cluster_and_a_device_are_not_for_one_run(place, tmp_path, monkeypatch, verb):
    from attngap.models import placement
    from attngap.probes import runs

    gpu = torch.device("cuda")
    monkeypatch.setattr(placement, "parse_device", lambda _name: gpu)  # as if there were one
    monkeypatch.setattr(runs, "parse_device", lambda _name: gpu)
    out, db = str(tmp_path / "out"), str(tmp_path / "runs.db")
    model = str(place / "model")
    words = {"diagnose": ["diagnose", model, "-o", out], "probe": ["probe", "run", "copy", "-m", "elu", "--db", db]}
    done = RUNNER.invoke(app, [*words[verb], "--device", "cuda", "--ray", "auto"])
    assert isinstance(done.exception, AttngapError)
    assert str(done.exception).startswith("Workers of a cluster compute on their CPUs")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["diagnose", "linearize"])
@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at '127.0.0.1:1'"),
        ("auto", "No Ray cluster at 'auto'"),
        ("nowhere", "Ray address 'nowhere' is not host:port"),
        ("", "Ray address '' is not host:port"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_before_the_model_is_loaded(
    place, tmp_path, monkeypatch, verb, address, line
):
    pytest.importorskip("ray", reason="ray is not installed: pip install attngap[ray]")
    monkeypatch.setattr("attngap.models.load.load", lambda *_, **__: pytest.fail("the model was loaded first"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = RUNNER.invoke(app, [*verbs(place, tmp_path / "out")[verb], "--context", "48", "--ray", address])
    assert isinstance(done.exception, AttngapError)
    assert str(done.exception).startswith(line)
    assert "\n" not in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_cluster_is_sent_all_weights(place, tmp_path):
    done = RUNNER.invoke(app, [*verbs(place, tmp_path / "out")["diagnose"], "--max-memory", "1MB", "--ray", "auto"])
    assert str(done.exception).endswith("--max-memory leaves some on disk. Leave out one of them")


def test_half_precision_from_diagnosis_to_text(place, tmp_path):
    model, text = str(place / "model"), str(place / "text.txt")
    half, small = ["--dtype", "bfloat16"], ["--text", text, "--context", "48"]
    run = RUNNER.invoke(app, ["diagnose", model, "-o", str(tmp_path / "d"), "--quick", "--json", *small, *half])
    assert run.exit_code == 0, run.output
    single = RUNNER.invoke(app, ["diagnose", model, "-o", str(tmp_path / "s"), "--quick", "--json", *small])
    one, other = (torch.tensor([h["entropy"] for h in json.loads(x.stdout)["heads"]]) for x in (run, single))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
    few = ["--tokens", "96", "--steps", "1", "--joint", "0", "--rounds", "0", "--no-measure", "--window", "8"]
    run = RUNNER.invoke(app, ["linearize", model, "-o", str(tmp_path / "c"), *small, *few, *half])
    assert run.exit_code == 0, run.output
    run = RUNNER.invoke(app, ["generate", str(tmp_path / "c"), "green bottles", "--tokens", "3", "--json", *half])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["cache_bytes"] > 0
