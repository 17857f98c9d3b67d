"""Damaged files are refused in one line, whatever is wrong with them."""

import os

import pytest
from pydantic import BaseModel, ConfigDict, Field

from attngap.errors import AttngapError
from attngap.storage.records import read_record


class Letter(BaseModel):
    model_config = ConfigDict(extra="forbid")
    schema_: str = Field(alias="schema")
    words: int


def read(path):
    return read_record(path, Letter, what="letter", schema="letter/1", hint="Write one")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": "letter/1", "words": "many"}', "is wrong at 'words': Input should be a valid integer"),
        (b'{"schema": "letter/1"}', "is wrong at 'words': Field required"),
        (b'{"schema": "letter/2", "words": 3}', "is not a letter this version reads: schema 'letter/2', expected"),
        (b"[1, 2]", "is not a letter this version reads: schema None"),
        (b'{"schema": ', "is not JSON: "),
        (b"[" * 100_000, "is not JSON: maximum recursion depth"),
        ("{}".encode("utf-16"), "Cannot read the letter .* can't decode"),
    ],
)
def test_what_is_no_letter_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(AttngapError, match=message) as caught:
        read(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_missing_files_folders_and_pipes_are_refused(tmp_path):
    with pytest.raises(AttngapError, match=r"Cannot read the letter .*: No such file or directory\. Write one"):
        read(tmp_path / "none.json")
    with pytest.raises(AttngapError, match="it is not a file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AttngapError, match="it is not a file"):
        read(tmp_path / "pipe")


def test_a_letter_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"schema": "letter/1", "words": 3}')
    assert read(tmp_path / "a.json").words == 3
