"""What every task promises: sizes, seeds, chance, an oracle that reaches the best score, no leakage."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from attngap.errors import AttngapError
from attngap.probes.presets import PRESETS
from attngap.probes.tasks.base import stream
from attngap.probes.tasks.catalogue import TASKS, task
from attngap.probes.tasks.recall import predicted_recall

NAMES = [cls.name for cls in TASKS]
SYNTHETIC = [name for name in NAMES if name != "text"]


def preset_task(name):
    return task(name, **PRESETS[name].task)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_ranges(name):
    t = preset_task(name)
    batch = t.sample(7, stream("train", 0))
    assert batch.inputs.shape[:2] == (7, t.tokens)
    assert batch.where.shape == batch.targets.shape
    assert batch.where.min() >= 0
    assert batch.where.max() < t.tokens
    assert all(len(row.unique()) == len(row) for row in batch.where)
    if t.vocabulary is None:
        assert batch.inputs.shape[2] == t.features
    else:
        assert batch.inputs.min() >= 0
        assert batch.inputs.max() < t.vocabulary
    if t.outputs > 1:
        assert batch.targets.min() >= 0
        assert batch.targets.max() < t.outputs


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_data_other_seed_other_data(name):
    t = preset_task(name)
    first, again, other = (t.sample(4, stream("train", seed)) for seed in (0, 0, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_no_sequence_of_the_test_is_ever_trained_on(name):
    t = preset_task(name)
    seen = {row.numpy().tobytes() for seed in (0, 1) for row in t.sample(1024, stream("train", seed)).inputs}
    held_out = {row.numpy().tobytes() for row in t.sample(512, stream("test", 0)).inputs}
    assert len(held_out) == 512
    assert not seen & held_out


@pytest.mark.parametrize("name", SYNTHETIC)
def test_oracle_reaches_the_best_score(name):
    t = preset_task(name)
    batch = t.sample(12_000, stream("oracle", 0))
    blind = dataclasses.replace(batch, targets=torch.zeros_like(batch.targets))
    tolerance = 0.0 if t.higher else 0.1 * t.best  # squared errors have heavy tails; right answers have none
    assert t.score(t.oracle(blind), batch) == pytest.approx(t.best, abs=tolerance)


@pytest.mark.parametrize("name", ["mqar", "copy", "selective-copy", "induction", "needle", "fuzzy-recall"])
def test_chance_is_a_guess_that_ignores_the_question(name):
    """Guess among the answers this sequence can have; where these are all symbols, take another sequence's answers."""
    t = preset_task(name)
    batch = t.sample(4000, stream("chance", 0))
    pools = {
        "mqar": batch.targets,
        "selective-copy": batch.targets,
        "needle": batch.targets,
        "induction": batch.inputs[:, 1 : getattr(t, "passage", 0)],
    }
    if name in pools:
        pick = torch.randint(pools[name].shape[1], batch.targets.shape, generator=stream("chance", 1))
        guess = pools[name].gather(1, pick)
    else:
        guess = batch.targets.roll(1, dims=0)
    assert t.score(guess, batch) == pytest.approx(t.chance, rel=0.1)


@pytest.mark.parametrize("name", ["icl-regression", "single-location"])
def test_chance_of_a_regression_is_predicting_zero(name):
    t = preset_task(name)
    batch = t.sample(4000, stream("chance", 0))
    assert t.score(torch.zeros_like(batch.targets), batch) == pytest.approx(1.0, rel=0.1)
    assert t.best < 0.5


def test_closed_and_solved():
    t = task("copy", symbols=2)
    assert t.closed(0.5) == 0
    assert t.closed(1.0) == 1
    assert t.solved(0.98)
    assert not t.solved(0.9)
    t = task("single-location")
    assert t.closed(t.best) == pytest.approx(1.0)
    assert not t.solved(1.0)


def test_mqar_is_what_zoology_says():
    t = task("mqar", length=40, pairs=6, vocabulary=40)
    batch = t.sample(200, stream("x", 0))
    for row, where, targets in zip(batch.inputs.tolist(), batch.where.tolist(), batch.targets.tolist(), strict=True):
        pairs = dict(zip(row[0:12:2], row[1:12:2], strict=True))
        assert len(pairs) == 6
        assert len(set(pairs.values())) == 6
        assert all(key < 20 <= value for key, value in pairs.items())
        assert {row[i] for i in where} == set(pairs)  # each key once more
        assert all(i % 2 == 0 and i >= 12 for i in where)
        assert [pairs[row[i]] for i in where] == targets
        assert all(row[i] >= 20 for i in range(12, 40) if i not in where)  # noise is never a key


def test_mqar_gaps_follow_the_power_law():
    t = task("mqar", length=64, pairs=1, vocabulary=64, power=0.01)
    gaps = (t.sample(40_000, stream("x", 0)).where.flatten() - 2) // 2
    law = np.arange(1, 32) ** (0.01 - 1.0)
    np.testing.assert_allclose(np.bincount(gaps, minlength=31) / 40_000, law / law.sum(), atol=0.01)


def test_copy_repeats_itself():
    t = task("copy", items=5, symbols=9)
    batch = t.sample(50, stream("x", 0))
    assert torch.equal(batch.inputs[:, :5], batch.targets)
    assert (batch.inputs[:, 5] == 9).all()
    assert torch.equal(batch.inputs[:, 6:], batch.targets[:, :-1])
    assert batch.where[0].tolist() == [5, 6, 7, 8, 9]


def test_selective_copy_drops_blanks():
    t = task("selective-copy", length=10, items=3, symbols=5)
    for row, targets in zip(*(x.tolist() for x in _pair(t.sample(50, stream("x", 0)))), strict=True):
        assert [token for token in row[:10] if token != 6] == targets
        assert len(set(targets)) == 3
        assert row[10:] == [5, *targets[:-1]]


def test_induction_asks_for_the_successor():
    t = task("induction", passage=6, queries=3, vocabulary=10)
    for row, targets in zip(*(x.tolist() for x in _pair(t.sample(50, stream("x", 0)))), strict=True):
        follows = dict(itertools.pairwise(row[:6]))
        assert len(set(row[:6])) == 6
        assert [follows[row[i]] for i in (6, 8, 10)] == targets
        assert [row[i] for i in (7, 9, 11)] == targets


def test_fuzzy_recall_needs_the_whole_key():
    t = task("fuzzy-recall", pairs=4, key_symbols=2, key_tokens=3, value_tokens=2, value_symbols=5)
    for row, targets in zip(*(x.tolist() for x in _pair(t.sample(50, stream("x", 0)))), strict=True):
        first, again = ([tuple(part[i : i + 5]) for i in range(0, 20, 5)] for part in (row[:20], row[20:]))
        assert sorted(first) == sorted(again)
        assert len({pair[:3] for pair in first}) == 4
        assert [token for pair in again for token in pair[3:]] == targets


def test_needle_is_the_separation_data():
    t = task("needle", rows=12, kinds=4, a1=0.7, a0=0.05, b=0.4)
    batch = t.sample(30, stream("x", 0))
    unit = np.sqrt(np.log(12))
    rows = batch.inputs[:, :-1] / unit
    torch.testing.assert_close(batch.inputs[:, -1] / unit, torch.eye(6)[:1].expand(30, -1))  # asks for column 1
    torch.testing.assert_close(rows[:, :, 0].max(1).values, torch.full((30,), 0.7))
    assert ((rows[:, :, 0] <= 0.05).sum(1) == 11).all()
    torch.testing.assert_close(rows[:, :, 1:-1].sum(1), torch.full((30, 4), 3 * 0.4))  # every kind three times
    torch.testing.assert_close(rows[:, :, -1], torch.full((30, 12), 0.6))


def test_needles_of_many_directions():
    t = task("needle", rows=12, kinds=4, columns=3, directions=6, needles=4, a0=0.05)
    torch.testing.assert_close(t.codebook.norm(dim=-1), torch.ones(6))
    batch = t.sample(30, stream("x", 0))
    rows, questions = (part / np.sqrt(np.log(12)) for part in batch.inputs.split([12, 4], dim=1))
    assert (questions[:, :, 3:] == 0).all()
    for sequence, asked, answers in zip(rows, questions[:, :, :3], batch.targets.tolist(), strict=True):
        assert len({tuple(direction) for direction in asked.tolist()}) == 4
        assert sorted(answers) == [0, 1, 2, 3]  # as many needles as kinds: each once
        long = sequence[:, :3].norm(dim=-1) > 0.1
        assert long.sum() == 4
        for direction, answer in zip(asked, answers, strict=True):
            (place,) = torch.nonzero((sequence[:, :3] - 0.7 * direction).abs().sum(-1) < 1e-5)[:, 0].tolist()
            assert sequence[place, 3:-1].argmax() == answer


def test_icl_regression_oracle_is_ridge():
    """Against the normal equations of the stacked system, one place at a time."""
    t = task("icl-regression", dim=3, points=6, noise=0.2)
    batch = t.sample(5, stream("x", 0))
    answers = t.oracle(batch)
    for b in range(5):
        x, y = batch.inputs[b, 0::2, :3].numpy().astype(float), batch.inputs[b, 1::2, 3].numpy().astype(float)
        for i in range(6):
            rows = np.vstack([x[:i], np.sqrt(3) * 0.2 * np.eye(3)])
            w = np.linalg.lstsq(rows, np.concatenate([y[:i], np.zeros(3)]), rcond=None)[0]
            assert answers[b, i].item() == pytest.approx(x[i] @ w, abs=1e-4)


@pytest.mark.parametrize("directions", [1, 24])
def test_single_location_is_one_shifted_token(directions):
    t = task("single-location", dim=8, length=16, signal=2.0, noise=0.0, directions=directions)
    batch = t.sample(20_000, stream("x", 0))
    asked = batch.inputs[:, -1]
    assert len(asked.unique(dim=0)) == directions
    torch.testing.assert_close(asked.norm(dim=1), torch.ones(20_000))
    along = (batch.inputs[:, :-1] @ asked[:, :, None]).sum((1, 2))  # 16 standard normals and one shift
    assert along.mean() == pytest.approx(2.0 * np.sqrt(8 / 2), abs=0.1)
    assert along.var() == pytest.approx(16, rel=0.05)
    assert batch.targets.var() == pytest.approx(1, rel=0.05)
    assert (batch.targets * along[:, None]).mean() == pytest.approx(0, abs=0.15)  # the shift says nothing about y


def test_single_location_oracle_beats_every_temperature():
    """The Bayes weights are a softmax at exactly this scale; sharper or flatter ones do worse."""
    t = task("single-location", dim=8, length=32, signal=1.0)
    batch = t.sample(20_000, stream("x", 0))
    exact = t.score(t.oracle(batch), batch)
    for factor in (0.5, 2.0):
        other = dataclasses.replace(t, signal=factor)
        assert exact < t.score(other.oracle(batch), batch)


def test_text_splits_are_disjoint_pieces_of_the_text():
    t = task("text", length=32)
    whole = b"".join(t.part(split).numpy().tobytes() for split in ("train", "validation", "test"))
    from pydoc_data.topics import topics

    assert whole == "\n".join(topics[name] for name in sorted(topics)).encode()
    for split in ("train", "validation", "test"):
        text = t.part(split).numpy().tobytes()
        batch = t.sample(20, stream("x", 0), split)
        for row, target in zip(batch.inputs, batch.targets, strict=True):
            window = bytes(row.tolist()) + bytes([int(target[-1])])
            assert window in text
            assert bytes(target.tolist()) == window[1:]


def test_text_of_one_s_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"ab" * 1000)
    t = task("text", length=16, file=str(file))
    assert t.chance == pytest.approx(1.0)
    uniform = torch.zeros(2, 16, 256)
    assert t.grade(uniform, t.sample(2, stream("x", 0))) == pytest.approx(8.0)


def test_predicted_recall_against_a_random_memory():
    """A sum of outer products of random keys and codebook values, read by argmax."""
    generator = torch.Generator().manual_seed(0)
    for pairs in (20, 60, 150):
        right = []
        for _ in range(30):
            keys = torch.nn.functional.normalize(torch.randn(pairs, 48, generator=generator), dim=1)
            codes = torch.nn.functional.normalize(torch.randn(256, 32, generator=generator), dim=1)
            ids = torch.randint(256, (pairs,), generator=generator)
            right.append(((keys @ (keys.T @ codes[ids]) @ codes.T).argmax(1) == ids).float().mean().item())
        assert predicted_recall(pairs, 48, 32, 256) == pytest.approx(np.mean(right), abs=0.06)


def test_predicted_recall_is_half_at_the_capacity_law():
    for rank, dim, choices in ((64, 64, 512), (128, 32, 256)):
        half = round(rank * dim / (2 * np.log(choices)))
        assert predicted_recall(half, rank, dim, choices) == pytest.approx(0.5, abs=0.15)
        assert predicted_recall(half // 4, rank, dim, choices) > 0.95


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqar", {"pairs": 300, "length": 2000}, "mqar: pairs must be at most half the vocabulary, 256, got 300"),
        ("mqar", {"pairs": 20, "length": 64}, "length must be at least 4 x pairs = 80, got 64"),
        ("mqar", {"power": 0.0}, "power must be above 0"),
        ("copy", {"items": 0}, "copy: items must be at least 1, got 0"),
        ("selective-copy", {"items": 60}, "items must be at most length, 48, got 60"),
        ("induction", {"passage": 200}, "passage must be at most vocabulary, 128, got 200"),
        (
            "fuzzy-recall",
            {"pairs": 80},
            r"pairs must be at most key_symbols \*\* key_tokens = 64 distinct keys, got 80",
        ),
        ("needle", {"rows": 100, "kinds": 16}, "kinds must divide rows, got 16 kinds and 100 rows"),
        ("needle", {"needles": 3, "directions": 2, "columns": 2}, "needles must be at most directions = 2, got 3"),
        ("needle", {"directions": 2}, "directions must be 1 where columns is 1, got 2"),
        ("single-location", {"directions": 0}, "directions must be at least 1, got 0"),
        ("text", {"length": 10**6}, "the bytes in the smallest split, got 1000000"),
        ("text", {"file": "nowhere.txt"}, "text: no file 'nowhere.txt'"),
        ("copy", {"itmes": 3}, "No option of task copy 'itmes'. Did you mean 'items'"),
        ("copy", {"items": "many"}, "copy: items must be int, got 'many'"),
        ("coppy", {}, "No task 'coppy'. Did you mean 'copy'? List them: attngap probe list"),
    ],
)
def test_bad_input(name, options, message):
    with pytest.raises(AttngapError, match=message.replace("?", r"\?")):
        task(name, **options)


def _pair(batch):
    return batch.inputs, batch.targets
