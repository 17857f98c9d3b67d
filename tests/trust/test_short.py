"""The long run in a short form: a little of every part. All of it: `make trust`; what came out: docs/reliability.md."""

import faulthandler
import os
import signal

import pytest
import torch

from attngap.ops import native
from tests.trust import damage, fenced_calls, fenced_products, fences, files, kills, million, numerics
from tests.trust.outcome import Outcome
from tests.trust.parts import PARTS


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return kills.Bench(tmp_path_factory.mktemp("bench"), ["linearize", "linearize --overwrite"])


@pytest.mark.filterwarnings("ignore")  # a fork of a process with threads is what this is about
@pytest.mark.parametrize(
    ("verb", "how", "part"),
    [
        ("linearize", "killed", 0.06),  # its folder for pieces is there and not marked as ours
        ("linearize --overwrite", "killed", 0.85),
        ("linearize", "disk full", 0.8),
        ("linearize", "interrupted at a random time", 0.5),
    ],
)
def test_a_disturbed_run_started_again_gives_the_same_result(bench, verb, how, part):
    assert kills.disturb(bench, verb, how, int(bench.events[verb] * part)).faults == []


@pytest.mark.filterwarnings("ignore")
def test_a_difference_between_results_is_noticed(bench):
    assert "adapter.safetensors (differs)" in kills.difference(
        kills.content(bench.folder / "old"), bench.expected["linearize"]
    )
    assert bench.run("linearize", bench.folder / "old").code == 2  # already there


@pytest.mark.parametrize("kind", files.KINDS)
def test_damaged_files_are_read_or_refused(kind):
    slow = kind.startswith("report") or "token" in kind or kind in ("GGUF header",)
    assert files.damage(kind, 2 if slow else 20, seed=-1).faults == []


def test_a_reader_that_fails_is_noticed(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    broken = damage.Kind(path, lambda: {"a": 1}[path.read_text()[2:3]])
    assert "KeyError" in damage.damaged("broken", broken, 20, 0).faults[0]


@pytest.mark.parametrize("number", range(3))
def test_hostile_numbers_are_within_their_bounds(number):
    found = numerics.batch(1000 + number)
    assert found.faults == []
    assert sum(found.counts.values()) > 500


def test_a_wrong_number_is_noticed():
    def wrong(case):
        found = numerics.softmax(case)
        found.out[3, 1, 0] += 1e-3 * found.right[3, 1, 0].abs().max().clamp_min(1).float()
        return found

    case = numerics.Case(torch.Generator().manual_seed(0), torch.float32, 20, 8, 8)
    found = numerics.compared("softmax_attention", case, wrong, "torch")
    assert max(found.worst.values()) > numerics.bound("softmax_attention, float32")


@pytest.mark.skipif(not native.available(), reason="numba is not installed")
def test_kernels_stay_between_forbidden_pages():
    found = fences.batch(10_000, calls=25)
    found.add(fences.decode(10_000))
    found.add(fenced_calls.batch(10_000))
    found.add(fenced_products.batch(10_000))
    assert found.faults == []


def test_forbidden_pages_are_forbidden():
    import ctypes

    x = fences.Fences().place(torch.ones(7))
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # its words are for crashes that nobody asked for
        ctypes.string_at(x.data_ptr() + x.nbytes, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_odd_requests_to_the_explorer_have_an_answer():
    pytest.importorskip("fastapi")
    from tests.trust import requests

    assert requests.batch(1000, requests=60).faults == []


@pytest.mark.parametrize("name", ["elu", "gated-delta", "hybrid", million.CACHE])
def test_many_tokens_leave_the_state_as_large_as_it_was(name):
    assert million.stream(name, tokens=4_000).faults == []


@pytest.mark.parametrize("part", PARTS)
def test_parts_have_units_that_are_their_own_names(part):
    units = PARTS[part].units()
    assert len(set(units)) == len(units) > 10


def test_outcomes_add_up_and_what_is_no_number_is_worst():
    total = Outcome()
    for figure in (1.0, float("nan"), 0.5):
        total.add(Outcome({"x": 2}, {"x": figure}, []))
    assert total.counts == {"x": 6}
    assert not total.worst["x"] <= 1e9
