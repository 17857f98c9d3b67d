import os

import pytest

from attngap.errors import AttngapError
from attngap.storage import files
from attngap.storage.files import write_atomically, write_text
from attngap.storage.folder import drop_drafts


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "result.json"
    write_text(path, "old")

    def half(draft):
        draft.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(AttngapError, match=r"Cannot write '.*result\.json': No space left on device\. Make room"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize(("lasting", "flushed"), [(True, 2), (False, 0)])
def test_what_must_last_is_flushed_before_and_after_the_rename(tmp_path, monkeypatch, lasting, flushed):
    steps = []
    flush, replace = files.flush, os.replace
    monkeypatch.setattr(files, "flush", lambda path: steps.append("flush") or flush(path))
    monkeypatch.setattr(files.os, "replace", lambda *paths: steps.append("rename") or replace(*paths))
    write_atomically(tmp_path / "a", lambda draft: draft.write_text("x"), lasting=lasting)
    assert steps == (["flush", "rename", "flush"] if flushed else ["rename"])


def test_a_place_that_is_not_there_is_told_in_one_line(tmp_path):
    with pytest.raises(AttngapError, match=r"No such file or directory\. Choose another place") as caught:
        write_text(tmp_path / "none" / "a", "x")
    assert "\n" not in str(caught.value)


def test_drafts_of_killed_processes_are_dropped_and_no_others(tmp_path):
    import os
    import subprocess
    import sys

    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead, alive = gone.stdout.strip(), os.getpid()
    for name in (f".plan.json.{dead}.draft", f".plan.json.{alive}.draft", ".mine.draft", "notes.draft"):
        (tmp_path / name).write_text("x")
    for name in (f".new-{dead}", f".new-{alive}", ".new-ideas"):
        (tmp_path / name).mkdir()
    drop_drafts(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f".plan.json.{alive}.draft", ".mine.draft", "notes.draft", f".new-{alive}", ".new-ideas"}
