import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attngap.engine import run
from attngap.errors import AttngapError
from tests.engine.jobs import die_always, die_once, slow, square, wait_for_go


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_once(workers):
    outcomes = list(run(square, list(range(20)), workers=workers))
    assert sorted((outcome.index, outcome.value) for outcome in outcomes) == [(x, x * x) for x in range(20)]
    assert {outcome.attempts for outcome in outcomes} == {1}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_raises_does_not_disturb_the_others(workers):
    outcomes = {outcome.index: outcome for outcome in run(square, [3, -1, 4], workers=workers)}
    assert "ValueError: negative: -1" in outcomes[1].error
    assert (outcomes[0].value, outcomes[2].value) == (9, 16)


def test_results_stream_before_the_last_job_ends(tmp_path):
    stream = run(wait_for_go, [(str(tmp_path), 0), (str(tmp_path), 1)], workers=2)
    assert next(stream).value == 0
    (tmp_path / "go").touch()  # until now job 1 could not end
    assert next(stream).value == 1


def test_dead_workers_are_retried(tmp_path):
    outcomes = list(run(die_once, [(str(tmp_path), x) for x in range(8)], workers=2))
    assert sorted(outcome.value for outcome in outcomes) == list(range(8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["died-0", "died-3", "died-6"]


def test_a_job_that_always_kills_is_named_and_the_rest_finish():
    outcomes = {outcome.index: outcome for outcome in run(die_always, list(range(5)), workers=2, retries=1)}
    assert outcomes[2].error == "its worker died 2 times"
    assert sorted(outcome.value for index, outcome in outcomes.items() if index != 2) == [0, 1, 3, 4]


def test_closing_the_stream_stops_the_workers(tmp_path):
    stream = run(slow, [(str(tmp_path), x, 0.0 if x == 0 else 60.0) for x in range(4)], workers=2)
    next(stream)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    stream.close()
    assert_gone(tmp_path)


INTERRUPTED = """
import signal, sys
from attngap.engine import run
from tests.engine.jobs import slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background would inherit an ignored Ctrl-C
try:
    for outcome in run(slow, [(sys.argv[1], x, 60.0) for x in range(4)], workers=2):
        pass
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_interrupt_stops_cleanly(tmp_path):
    """Ctrl-C reaches the whole process group, as in a terminal: the driver ends, its workers with it."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out == "stopped\n"
    assert_gone(tmp_path)


def test_workers_end_with_a_killed_driver(tmp_path):
    """Nothing is left behind by kill -9, which no driver can answer."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert_gone(tmp_path)


def assert_gone(folder):
    """Every process that began a job has ended (a zombie has)."""
    pids = {int(path.name.split("-")[2]) for path in folder.iterdir()}
    deadline = time.monotonic() + 10
    while (alive := {pid for pid in pids if _alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bad_counts():
    with pytest.raises(AttngapError, match="workers must be at least 1, got 0"):
        run(square, [1], workers=0)
    with pytest.raises(AttngapError, match="retries must be at least 0, got -1"):
        run(square, [1], retries=-1)
