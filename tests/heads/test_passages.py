"""Passages: exact length, never shared between splits, the same for the same seed."""

import pytest

from attngap.errors import AttngapError
from attngap.heads.passages import language_reference, passages, read, special_tokens, stress
from tests import zoo

TEXT = " ".join(f"word{i}" for i in range(4000))


@pytest.mark.parametrize("specials", [False, True])
def test_passages_have_exactly_the_context_and_repeat_with_the_seed(specials):
    tokenizer = zoo.tokenizer(specials)
    rows = passages(tokenizer, TEXT, context=64, count=5, seed=3)
    assert rows.shape == (5, 64)
    assert rows.equal(passages(tokenizer, TEXT, context=64, count=5, seed=3))
    assert not rows.equal(passages(tokenizer, TEXT, context=64, count=5, seed=4))
    assert len({tuple(row) for row in rows.tolist()}) == 5
    if specials:
        assert rows[:, 0].tolist() == [2] * 5
        assert rows[:, -1].tolist() == [3] * 5


def test_calibration_and_held_out_text_are_disjoint_whatever_the_contexts():
    tokenizer = zoo.tokenizer()
    seen = tokenizer.batch_decode(passages(tokenizer, TEXT, context=100, count=100))
    held = tokenizer.batch_decode(passages(tokenizer, TEXT, context=37, count=100, split="heldout"))

    def whole_words(rows):
        return {word for row in rows for word in row.replace(" ", "").split("word")[2:-1]}

    assert whole_words(seen)
    assert whole_words(held)
    assert not whole_words(seen) & whole_words(held)


def test_the_default_text_is_the_language_reference():
    tokenizer = zoo.tokenizer()
    assert sum(map(len, language_reference())) > 100_000
    assert passages(tokenizer, context=256, count=2).shape == (2, 256)


def test_stress_repeats_ordinary_tokens_after_its_period():
    tokenizer = zoo.tokenizer(specials=True)
    rows, period = stress(tokenizer, context=64, seed=1)
    prefix, suffix = special_tokens(tokenizer)
    assert (prefix, suffix) == ([2], [3])
    body = rows[0, 1:-1]
    assert period == 31
    assert body[:period].equal(body[period:])
    assert body.min() >= 4
    assert len(set(body[:period].tolist())) == period
    assert not rows.equal(stress(tokenizer, context=64, seed=2)[0])


def test_too_little_text_says_how_much_there_is():
    tokenizer = zoo.tokenizer()
    with pytest.raises(
        AttngapError, match=r"too short: its calibration part has \d+ tokens, room for 0 passages of 64"
    ):
        passages(tokenizer, "a few words", context=64, count=1)
    with pytest.raises(AttngapError, match="The text is empty"):
        passages(tokenizer, "  \n", context=64, count=1)
    with pytest.raises(AttngapError, match="context >= 3"):
        passages(zoo.tokenizer(specials=True), TEXT, context=2, count=1)
    with pytest.raises(AttngapError, match="stress passage needs context >= 6"):
        stress(zoo.tokenizer(specials=True), context=5)


def test_files_are_read_or_refused(tmp_path):
    good, empty, binary = tmp_path / "good.txt", tmp_path / "empty.txt", tmp_path / "binary.txt"
    good.write_text("hello", encoding="utf-8")
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert read([good]) == ["hello"]
    for path, message in ((empty, "is empty"), (binary, "Give UTF-8"), (tmp_path / "none.txt", "Cannot read")):
        with pytest.raises(AttngapError, match=message):
            read([path])
