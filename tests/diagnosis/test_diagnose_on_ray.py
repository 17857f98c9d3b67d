"""A diagnosis whose passages and layers are jobs of a cluster is the diagnosis of this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import attngap
from attngap.diagnosis import diagnose
from attngap.diagnosis.result import Diagnosis
from attngap.engine import cluster as cluster_module
from attngap.errors import AttngapError
from tests.conversion.small import TEXT
from tests.engine.pretended_ray import PretendedRay
from tests.zoo import tiny, tokenizer

OPTIONS = {"context": 64, "passages": 2, "window": 8, "ranks": (4, 8), "verify": 2}


@pytest.fixture(autouse=True)
def _one_thread():
    """As workers have it: the number of threads decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(model, **more):
    return attngap.diagnose(model, tokenizer(), TEXT, **{**OPTIONS, **more})


def numbers(found: Diagnosis) -> dict:
    """All but how long it took, and when."""
    return found.model_dump(exclude={"seconds", "provenance"})


@pytest.fixture
def pretended(monkeypatch):
    made = PretendedRay()
    monkeypatch.setattr(cluster_module, "_connect", lambda _address: made)
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "sliding"])
def test_the_result_is_the_same(name, pretended):
    more = {"verify": 0} if name in ("t5", "sliding") else {}
    here, there = run(tiny(name), **more), run(tiny(name), ray="pretended", **more)
    assert numbers(there) == numbers(here)
    assert pretended.performed > 10
    assert pretended.over


def test_a_quick_diagnosis_and_a_converted_model(pretended):
    assert numbers(run(tiny(), quick=True, verify=0, ray="x")) == numbers(run(tiny(), quick=True, verify=0))
    options = {"context": 64, "tokens": 256, "steps": 2, "joint": 0, "rounds": 1, "window": 8, "keep": 0.5}
    converted, _ = attngap.linearize(tiny(), tokenizer(), None, TEXT, measured=False, granularity="head", **options)
    assert numbers(run(converted, ray="x")) == numbers(run(converted))


def test_weights_are_sent_once(pretended):
    model = tiny()
    size = sum(x.nbytes for x in model.parameters())
    run(model, ray="pretended")
    assert sum(sent > size for sent in pretended.sent) == 1
    assert len(pretended.sent) == 3  # the run, no fits, all fits


def test_one_display_whichever_engine_runs(pretended, capsys):
    shown = []
    for ray in (None, "pretended"):
        run(tiny(), ray=ray, quiet=False)
        shown.append([line for line in capsys.readouterr().err.splitlines() if line.endswith(" ...")])
    assert shown[0] == shown[1]
    assert "floors and fits, stress passage ..." in shown[0]


def test_a_job_that_fails_is_said_and_what_is_done_is_kept(pretended, tmp_path, monkeypatch):
    from attngap.diagnosis import stages

    def fail(*_args, **_options):
        raise AttngapError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(stages, "projections", fail)
        with pytest.raises(AttngapError, match=r"^passage 0 could not be done on the cluster: no room$"):
            run(tiny(), ray="pretended", directory=tmp_path / "out")
    done = pretended.performed
    there = run(tiny(), ray="pretended", directory=tmp_path / "out")
    assert pretended.performed - done < done
    assert numbers(there) == numbers(run(tiny()))


def test_what_cannot_go_to_a_cluster_is_refused(pretended, monkeypatch):
    model = tiny()
    with monkeypatch.context() as patched:
        patched.setattr(diagnose, "device_of", lambda _model: torch.device("cuda:1"))
        with pytest.raises(AttngapError, match=r"the model would be on cuda:1\. Leave out --device or --ray"):
            run(model, ray="pretended")
    monkeypatch.setattr(diagnose, "has_weights_elsewhere", lambda _model: True)
    with pytest.raises(AttngapError, match=r"--max-memory leaves some on disk\. Leave out one of them"):
        run(model, ray="pretended")
    assert not pretended.sent


def test_no_cluster_at_the_address():
    with pytest.raises(AttngapError, match="Ray address 'nonsense' is not host:port"):
        run(tiny(), ray="nonsense")


def losing(monkeypatch, cluster, after: int, nodes: int) -> None:
    """From now on the cluster loses nodes when the driver has had so many outcomes."""
    whole, had = cluster_module.Cluster.next, []

    def following(self, also=0):
        found = whole(self, also)
        had.append(found)
        if len(had) == after:
            for _ in range(nodes):
                cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
        return found

    monkeypatch.setattr(cluster_module.Cluster, "next", following)


@pytest.mark.slow  # starting Ray's processes takes half a minute
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_dies_the_driver_is_killed_and_all_workers_go(two_nodes, tmp_path, monkeypatch):
    """One cluster for three questions, since starting it takes most of the time."""
    here = numbers(run(tiny()))
    with monkeypatch.context() as patched:
        losing(patched, two_nodes, after=2, nodes=1)
        assert numbers(run(tiny(), ray=two_nodes.address)) == here
    assert len(two_nodes.workers) == 1

    model, out = tmp_path / "model", tmp_path / "out"
    tiny().save_pretrained(model)
    tokenizer().save_pretrained(model)
    (tmp_path / "text.txt").write_text(TEXT)
    words = [sys.executable, "-c", "from attngap.cli import main; main()", "diagnose", str(model), "-o", str(out)]
    words += ["--text", str(tmp_path / "text.txt"), "--context", "64", "--passages", "2", "--window", "8"]
    words += ["--ranks", "4,8", "--verify", "2", "--ray", two_nodes.address]
    killed = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=one_thread())
    while killed.poll() is None and not list(out.glob(".attngap-work/*.piece")):
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (out / "diagnosis.json").exists()
    done = subprocess.run(words, capture_output=True, text=True, env=one_thread())
    assert done.returncode == 0, done.stderr
    assert numbers(Diagnosis.load(out))["heads"] == here["heads"]

    for name, seconds in (("LOOK_SECONDS", 1.0), ("LOST_SECONDS", 3.0)):
        monkeypatch.setattr(cluster_module, name, seconds)
    losing(monkeypatch, two_nodes, after=2, nodes=1)
    with pytest.raises(AttngapError, match=r"has lost all its workers; \d+ jobs are not done\.") as caught:
        run(tiny(), ray=two_nodes.address, directory=tmp_path / "lost")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "lost").glob(".attngap-work/*.piece"))
    assert numbers(run(tiny(), directory=tmp_path / "lost")) == here


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(attngap.__file__).parents[1])}
