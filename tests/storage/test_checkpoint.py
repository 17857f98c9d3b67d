"""Pieces of a run: whole or not there, ours or left alone."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from attngap.errors import AttngapError
from attngap.storage.checkpoint import LOCK, MARKER, Checkpoint, open_checkpoint

PIECE = {"x": torch.arange(6.0).reshape(2, 3), "none": torch.empty(0, 2, dtype=torch.long)}


class Killed(Exception):
    pass


def leave(folder, key=None):
    """A run that is killed after one piece."""
    with contextlib.suppress(Killed), open_checkpoint(folder, key or {}) as checkpoint:
        checkpoint.put("a", PIECE)
        raise Killed


def test_a_killed_run_leaves_its_pieces_and_a_finished_one_leaves_nothing(tmp_path):
    folder = tmp_path / "pieces"
    leave(folder)
    with open_checkpoint(folder, {}) as checkpoint:
        assert not checkpoint.resumed
        found = checkpoint.get("a")
        assert checkpoint.resumed
        assert all(torch.equal(found[name], PIECE[name]) for name in PIECE)
    assert not folder.exists()


def test_a_run_refused_before_its_first_piece_leaves_nothing(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for place in (there, tmp_path / "new"):
        with pytest.raises(AttngapError, match="no cluster"), open_checkpoint(place / "pieces", {"a": 1}):
            raise AttngapError("no cluster")
    assert list(tmp_path.rglob("*")) == [there]  # what was there before stays
    with contextlib.suppress(KeyboardInterrupt), open_checkpoint(tmp_path / "new" / "pieces", {"a": 1}) as run:
        run.put("one", {"x": torch.ones(1)})
        raise KeyboardInterrupt
    with pytest.raises(AttngapError), open_checkpoint(tmp_path / "new" / "pieces", {"a": 2}):
        raise AttngapError("refused")
    with open_checkpoint(tmp_path / "new" / "pieces", {"a": 1}) as run:
        assert run.get("one") is not None


def test_pieces_of_another_key_do_not_match(tmp_path):
    leave(tmp_path, {"seed": 0})
    with open_checkpoint(tmp_path, {"seed": 1}) as checkpoint:
        assert checkpoint.get("a") is None
        assert not checkpoint.has("a")


def test_reading_what_this_run_wrote_is_not_resuming(tmp_path):
    with open_checkpoint(tmp_path, {}) as checkpoint:
        checkpoint.put("a", PIECE)
        checkpoint.require("a")
        assert not checkpoint.resumed


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_piece_is_dropped_with_a_word_and_computed_again(tmp_path, damage):
    leave(tmp_path)
    (path,) = tmp_path.glob("a.*")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "flipped": data}[damage])
    with open_checkpoint(tmp_path, {}) as checkpoint:
        with pytest.warns(UserWarning, match="is damaged; it is dropped and computed again"):
            assert not checkpoint.has("a")
        assert checkpoint.get("a") is None  # and says so once
        with pytest.raises(AttngapError, match=r"The piece .* is gone"):
            checkpoint.require("a")


def test_only_our_own_files_are_removed(tmp_path):
    with open_checkpoint(tmp_path, {}) as checkpoint:
        checkpoint.put("a", PIECE)
        (tmp_path / "notes.txt").write_text("mine")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_folder_we_did_not_make_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(AttngapError, match="is not empty and was not made by attngap"), open_checkpoint(tmp_path, {}):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(AttngapError, match="Cannot write to"), open_checkpoint(tmp_path / "thesis.tex", {}):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path):
    with open_checkpoint(tmp_path, {}) as checkpoint:
        checkpoint.put("a", PIECE)
        code = "import sys; from pathlib import Path; from attngap.storage.checkpoint import open_checkpoint as o\n"
        code += "with o(Path(sys.argv[1]), {}): print('shared')"
        second = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert "is in use by another run" in second.stderr
        assert not second.stdout
        assert checkpoint.get("a") is not None


def test_the_lock_of_a_folder_that_was_just_removed_is_not_taken_for_the_new_one(tmp_path, monkeypatch):
    import attngap.storage.lock as lock

    asked = []

    def removed_once(path, handle):
        asked.append(path)
        return len(asked) > 1

    monkeypatch.setattr(lock, "_is", removed_once)
    with open_checkpoint(tmp_path, {}):
        assert {path.name for path in tmp_path.iterdir()} == {LOCK, MARKER}
    assert len(asked) == 2


def test_without_a_folder_pieces_are_temporary():
    with open_checkpoint(None, {}) as checkpoint:
        checkpoint.put("a", PIECE)
        folder = checkpoint.folder
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.has("a")
    assert not folder.exists()
