"""Passages that begin alike are read once, and say what they say alone."""

import pytest
import torch

from attngap.conversion import beginnings
from attngap.conversion.beginnings import guessed
from attngap.conversion.choose import convert
from attngap.heads.forward import outputs
from tests.zoo import mechanisms, tiny


def passages_of(seed: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Three places, two numbers each, in the same text; one of other text; one twice."""
    draw = torch.Generator().manual_seed(seed)
    text, other = (torch.randint(5, 60, (1, 400), generator=draw) for _ in range(2))
    numbers = torch.randint(5, 60, (2, 4), generator=draw)
    asked = []
    for place in (40, 200, 360):
        for number in numbers:
            row = torch.cat((text[:, :place], number[None], text[:, place:], number[None]), 1)
            asked.append((row, len(number)))
    return [*asked, (other, 6), asked[0]]


def one_by_one(model, asked):
    with torch.no_grad():
        return [outputs(model, row)[0, -n - 1 : -1].argmax(-1) == row[0, -n:] for row, n in asked]


@pytest.fixture
def read(monkeypatch):
    """Tokens that were read, by all calls."""
    seen = []
    forward = beginnings._Reader._forward

    def counted(self, tokens, cache, last):
        seen.append(tokens.shape[1])
        return forward(self, tokens, cache, last)

    monkeypatch.setattr(beginnings._Reader, "_forward", counted)
    return seen


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("replaced", [False, True])
def test_they_are_what_each_says_alone(name, replaced):
    model = tiny(name)
    longest = getattr(model.config, "max_position_embeddings", 512)
    model = convert(model, mechanisms(model), [(0, 1)]) if replaced else model
    asked = [(row[:, -min(longest, row.shape[1]) :], n) for row, n in passages_of()]
    # Answers that are the model's own, so that a lost one shows.
    with torch.no_grad():
        asked = [(torch.cat((r[:, :-n], outputs(model, r)[:, -n - 1 : -1].argmax(-1)), 1), n) for r, n in asked]
    expected = one_by_one(model, asked)
    assert any(bool(each.any()) for each in expected)
    for found, want in zip(guessed(model, asked), expected, strict=True):
        assert torch.equal(found, want)


def test_what_they_share_is_read_once(read):
    asked = passages_of()
    guessed(tiny(), asked)
    alone = sum(row.shape[1] for row, _ in asked)
    assert sum(read) + 400 < 0.8 * alone  # another text is read without a cache


def test_a_passage_alone_is_read_without_a_cache(read):
    asked = passages_of()[:1]
    guessed(tiny(), asked)
    assert read == []
