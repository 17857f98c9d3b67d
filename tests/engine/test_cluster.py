import socket

import pytest

from attngap.engine import cluster as cluster_module
from attngap.engine import run
from attngap.errors import AttngapError
from tests.engine.jobs import die_once, slow, square

ray = pytest.importorskip("ray", reason="ray is not installed: pip install attngap[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.slow  # starting Ray's processes takes half a minute
def test_jobs_errors_and_a_killed_node(two_nodes, tmp_path):
    """One cluster for three questions, since starting it takes most of the time."""
    outcomes = {outcome.index: outcome for outcome in run(square, [3, -1, 4], ray=two_nodes.address)}
    assert (outcomes[0].value, outcomes[2].value) == (9, 16)
    assert "ValueError: negative: -1" in outcomes[1].error

    died = list(run(die_once, [(str(tmp_path), x) for x in range(5)], ray=two_nodes.address))
    assert sorted(outcome.value for outcome in died) == list(range(5))
    assert (tmp_path / "died-3").exists()

    folder = tmp_path / "slow"
    folder.mkdir()
    stream = run(slow, [(str(folder), x, 2.0) for x in range(6)], ray=two_nodes.address)
    values = [next(stream).value]
    two_nodes.remove_node(two_nodes.workers[0], allow_graceful=False)
    values += [outcome.value for outcome in stream]
    assert sorted(values) == list(range(6))


class Deserted:
    """Ray as a driver sees it when every worker has gone: jobs are taken and nothing comes back."""

    def __init__(self, nodes):
        self.left, self.over, self.exceptions = nodes, False, ray.exceptions

    def remote(self, **_options):
        return lambda _function: Handle()

    def cluster_resources(self):
        return {}

    def wait(self, references, **_options):
        return [], references

    def nodes(self):
        return self.left

    def shutdown(self):
        self.over = True


class Handle:
    def remote(self, *_args):
        return object()


@pytest.mark.parametrize("nodes", [[], [{"Alive": False, "Resources": {"CPU": 2.0}}, {"Alive": True, "Resources": {}}]])
def test_a_cluster_that_loses_all_its_workers_is_told_in_a_line(monkeypatch, nodes):
    deserted = Deserted(nodes)
    monkeypatch.setattr(cluster_module, "_connect", lambda _address: deserted)
    with pytest.raises(AttngapError, match=r"'somewhere:1' has lost all its workers; 3 jobs are not done\.") as caught:
        list(cluster_module.run_cluster(square, [1, 2, 3], address="somewhere:1"))
    assert "\n" not in str(caught.value)
    assert deserted.over


def test_an_address_that_does_not_answer_is_refused_before_ray_waits_for_it(monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked, which waits minutes for an answer"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(AttngapError, match=rf"No Ray cluster answers at '127\.0\.0\.1:{port}' .* ray start --head"):
        next(run(square, [1], ray=f"127.0.0.1:{port}"))


def test_address_that_is_none():
    with pytest.raises(AttngapError, match="Ray address 'nonsense' is not host:port"):
        next(run(square, [1], ray="nonsense"))
