"""How many numbers a receipt hides."""

from attngap.conversion import quality
from tests.conversion.small import TEXT
from tests.zoo import tiny, tokenizer


def test_short_passages_hide_several_numbers_at_each_place_and_long_ones_one(monkeypatch):
    monkeypatch.setattr(quality, "CHEAP", 150)
    hidden = []
    hide = quality.hide

    def watched(words, hay, depth, *, seed):
        tokens, count = hide(words, hay, depth, seed=seed)
        hidden.append((len(hay), depth, tuple(tokens[0, -count:].tolist())))
        return tokens, count

    monkeypatch.setattr(quality, "hide", watched)
    model, words = tiny(), tokenizer()
    found = quality.needle(model, words, TEXT, lengths=(128, 192), trials=2, seed=0)
    assert set(found) == {f"{length}@{depth}" for length in (128, 192) for depth in (0.1, 0.5, 0.9)}
    for depth in quality.DEPTHS:
        short, long = ([n for size, at, n in hidden if (size, at) == (length, depth)] for length in (128, 192))
        assert len(set(short)) == 2 * quality.NUMBERS
        assert len(set(long)) == 2
