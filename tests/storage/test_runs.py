import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from attngap.errors import AttngapError
from attngap.storage.runs import Runs, spec_key

RESULT = {"score": 0.5, "seconds": 1.0, "curve": [1, 2]}


def spec(seed=0, **more):
    return {"task": "copy", "mechanism": "elu", "seed": seed, "learning_rate": 1e-3, **more}


@pytest.fixture
def runs(tmp_path):
    with Runs(tmp_path / "runs.db") as db:
        yield db


def test_a_run_comes_back_as_it_went_in(runs):
    assert runs.add(spec(), RESULT, {"commit": "abc"})
    (record,) = runs.records()
    assert (record.spec, record.result, record.provenance) == (spec(), RESULT, {"commit": "abc"})
    assert record.key == spec_key(spec())


def test_key_sees_every_entry_and_no_order():
    assert spec_key(spec(size={"a": 1, "b": 2})) == spec_key(dict(reversed(spec(size={"b": 2, "a": 1}).items())))
    assert spec_key(spec(size={"a": 1})) != spec_key(spec(size={"a": 2}))
    assert spec_key(spec(x=1)) != spec_key(spec(x=1.5))


def test_second_add_changes_nothing(runs):
    runs.add(spec(), RESULT, {})
    assert not runs.add(spec(), {**RESULT, "score": 0.9}, {})
    assert [record.result["score"] for record in runs.records()] == [0.5]


def test_missing_skips_what_is_there_and_repeats(runs):
    runs.add(spec(1), RESULT, {})
    assert runs.missing([spec(0), spec(1), spec(2), spec(0)]) == [spec(0), spec(2)]


def test_filters(runs):
    runs.add(spec(0), RESULT, {})
    runs.add({**spec(1), "mechanism": "softmax"}, RESULT, {})
    runs.add({**spec(2), "task": "mqar"}, RESULT, {})
    runs.announce("night", [spec(0), spec(9)])
    assert [record.spec["seed"] for record in runs.records(mechanism="elu", task="copy")] == [0]
    assert [record.spec["seed"] for record in runs.records(sweep="night")] == [0]
    assert len(runs.records()) == 3


def test_progress_counts_done_failed_and_left(runs):
    runs.announce("night", [spec(0), spec(1), spec(2)])
    runs.add(spec(0), RESULT, {})
    runs.fail(spec(1), "boom")
    (progress,) = runs.progress()
    assert (progress.sweep, progress.total, progress.done, progress.failed, progress.left) == ("night", 3, 1, 1, 1)
    assert runs.failures() == {spec_key(spec(1)): "boom"}
    runs.add(spec(1), RESULT, {})
    assert runs.progress()[0].failed == 0
    assert runs.failures() == {}


def test_nan_is_refused_and_leaves_no_row(runs):
    with pytest.raises(ValueError, match="JSON compliant"):
        runs.add(spec(), {**RESULT, "loss": float("nan")}, {})
    assert runs.records() == []


def test_reader_sees_the_writer_s_rows(tmp_path, runs):
    reader = Runs(runs.path, readonly=True)
    runs.add(spec(), RESULT, {})
    assert len(reader.records()) == 1
    with pytest.raises(AttngapError, match="cannot be used: attempt to write a readonly database"):
        reader.add(spec(1), RESULT, {})
    reader.close()


def test_no_database_to_read(tmp_path):
    with pytest.raises(AttngapError, match=r"No run database at .*none\.db\. Make one: attngap probe run"):
        Runs(tmp_path / "none.db", readonly=True)
    assert not (tmp_path / "none.db").exists()


def test_folder_missing(tmp_path):
    with pytest.raises(AttngapError, match=r"does not exist\. Create it first"):
        Runs(tmp_path / "no" / "runs.db")


def test_another_version(tmp_path):
    path = tmp_path / "runs.db"
    Runs(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=7")
    db.close()
    with pytest.raises(AttngapError, match="has schema version 7, this attngap reads version 1"):
        Runs(path)


def test_somebody_else_s_database_is_left_alone(tmp_path):
    path = tmp_path / "mail.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mail (id)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(AttngapError, match="not one of attngap's runs"):
        Runs(path)
    assert path.read_bytes() == before


def test_not_a_database(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("just text, " * 100)
    with pytest.raises(AttngapError, match="cannot be used as a run database: file is not a database"):
        Runs(path)


WRITER = """
import sys
from attngap.storage.runs import Runs
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Runs(path) as runs:
    for seed in range(first, first + count):
        spec = {"task": "copy", "mechanism": "elu", "seed": seed, "learning_rate": 1e-3}
        runs.add(spec, {"score": 0.5, "seconds": 1.0, "curve": list(range(2000))}, {})
        print(seed, flush=True)
"""


def writer(path, first, count):
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_kill_at_random_moments_loses_nothing_acknowledged(tmp_path):
    """25 writers killed with SIGKILL in mid-write: every row that was acknowledged is there, whole, once."""
    path = tmp_path / "runs.db"
    chance = random.Random(0)
    acknowledged = set()
    for attempt in range(25):
        process = writer(path, attempt * 100_000, 100_000)
        assert process.stdout is not None
        acknowledged.add(int(process.stdout.readline()))  # it is writing now
        time.sleep(chance.random() * 0.03)
        os.kill(process.pid, signal.SIGKILL)
        acknowledged |= {int(line) for line in process.stdout if line.endswith("\n")}
        process.stdout.close()
        process.wait()
        with Runs(path, readonly=True) as runs:
            seeds = [record.spec["seed"] for record in runs.records()]
            assert acknowledged <= set(seeds)
            assert len(seeds) == len(set(seeds))
            # At most the one run in flight may be there without having been acknowledged.
            assert len(seeds) <= len(acknowledged) + attempt + 1
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert all(len(json.loads(text)["curve"]) == 2000 for (text,) in db.execute("SELECT result FROM runs"))
    db.close()


def test_two_drivers_at_once(tmp_path):
    """The same 60 runs written by two processes at a time: every run once."""
    path = tmp_path / "runs.db"
    for process in [writer(path, 0, 60), writer(path, 0, 60)]:
        assert process.stdout is not None
        with process.stdout:
            assert len(process.stdout.readlines()) == 60
        assert process.wait() == 0
    with Runs(path, readonly=True) as runs:
        assert sorted(record.spec["seed"] for record in runs.records()) == list(range(60))


@pytest.mark.parametrize(
    ("table", "read"), [("plan", Runs.progress), ("runs", Runs.records), ("failures", Runs.failures)]
)
def test_damage_beyond_what_opening_reads_is_one_line(tmp_path, table, read):
    path = tmp_path / "runs.db"
    with Runs(path) as db:
        db.announce("small", [spec(seed) for seed in range(3)])
        db.add(spec(), RESULT, {})
        db.fail(spec(1), "why")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=DELETE")
        size = db.execute("PRAGMA page_size").fetchone()[0]
        pages = [page for (page,) in db.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = ?", (table,))]
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)
    with (
        Runs(path, readonly=True) as db,
        pytest.raises(AttngapError, match=r"runs.db is damaged: .* Give another --db"),
    ):
        read(db)


def test_a_schema_that_is_no_text_is_one_line(tmp_path):
    path = tmp_path / "runs.db"
    with Runs(path) as db:
        db.add(spec(), RESULT, {})
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    path.write_bytes(path.read_bytes().replace(b") STRICT", b") STR\xa0CT"))
    with pytest.raises(AttngapError, match=r"runs.db (is damaged|cannot be used)"), Runs(path, readonly=True) as db:
        db.records()
