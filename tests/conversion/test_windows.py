"""Windows by layer: the best combination that takes no more memory, and what it is chosen by."""

import itertools

import pytest
import torch

import attngap
from attngap.conversion import long as long_module
from attngap.conversion import run as run_module
from attngap.conversion import windows
from attngap.conversion.joint import divergence, geometric_mean
from attngap.conversion.linearize import linearize
from attngap.conversion.receipt import Receipt
from attngap.conversion.slices import Slice, SliceReference, read_past
from attngap.conversion.windows import set_windows, share_out, share_windows, window_gains
from attngap.models.mixed import mixed_heads
from attngap.models.positions import layer_positions
from tests.conversion.small import TEXT
from tests.zoo import VOCABULARY, mechanisms, tiny, tokenizer

KEEP = frozenset({(0, 0)})


def nothing(*_, **__):
    pass


def reference(*ends: int, window: int = 8) -> SliceReference:
    """Slices of 24 tokens of a model whose layers have features that were fitted to nothing."""
    model = tiny()
    rotary = layer_positions(model)[0].options()["rotary"]
    parts = mechanisms(model, map_options={"decay": True}, rotary=rotary, window=window)
    tokens = torch.randint(5, VOCABULARY, (1, max(ends)), generator=torch.Generator().manual_seed(0))
    past = read_past(model, tokens)
    return SliceReference(model, parts, [Slice(past, end - 24, end) for end in ends])


@pytest.mark.parametrize("seed", range(8))
def test_no_combination_is_better(seed):
    """Against all there are."""
    generator = torch.Generator().manual_seed(seed)
    sizes, layers = (4, 8, 12, 16, 32), range(4)
    groups = {layer: int(torch.randint(1, 4, (), generator=generator)) for layer in layers}
    rising = {layer: torch.rand(len(sizes), generator=generator).cumsum(0) for layer in layers}
    gains = {
        layer: {s: float(x - rising[layer][1]) for s, x in zip(sizes, rising[layer], strict=True)} for layer in layers
    }

    def gain(windows):
        return sum(gains[layer][w] for layer, w in zip(layers, windows, strict=True))

    def fits(windows):
        return sum(groups[layer] * w for layer, w in zip(layers, windows, strict=True)) <= 8 * sum(groups.values())

    best = max(filter(fits, itertools.product(sizes, repeat=len(layers))), key=gain)
    found = share_out(gains, groups, 8)
    assert fits(found.values())
    assert gain(found.values()) == pytest.approx(gain(best))


def test_a_narrow_window_is_not_believed_to_be_better():
    gains = {0: {4: 0.5, 8: 0.0, 16: 0.1}, 1: {4: -0.2, 8: 0.0, 16: 0.3}}
    assert share_out(gains, {0: 1, 1: 1}, 8) == {0: 4, 1: 8}  # 12 of 16: the widest has no room
    assert share_out(gains, {0: 2, 1: 1}, 8) == {0: 4, 1: 16}


def test_gains_are_slopes_of_the_divergence_and_what_curvature_takes_off(monkeypatch):
    """The slope against a small share of the other window's output, for every layer and window."""
    found, now, sizes, step = reference(60, 90), {0: 8, 1: 8}, (4, 8, 24), 1e-3
    curved, losses = window_gains(found, KEEP, now, sizes, nothing)
    torch.testing.assert_close(losses, found.divergence(KEEP))
    monkeypatch.setattr(windows, "label_directions", lambda out, _: iter([torch.zeros_like(out)]))
    straight, _ = window_gains(found, KEEP, now, sizes, nothing)
    cases = [(layer, size) for layer in now for size in sizes if size != now[layer]]
    for case in cases:
        real = []
        for place, teacher in found.pairs():
            shares, add = windows.new_shares(found, place, cases)
            losses = []
            for share in (-step, step):
                shares[case].data.fill_(share)
                with torch.no_grad():
                    losses.append(divergence(found.read(place, KEEP, add=add), teacher, is_language_model=True))
            real.append((losses[0] - losses[1]) / (losses[0] + losses[1]) / step)
        assert straight[case[0]][case[1]] == pytest.approx(float(sum(real)) / len(real), rel=0.05, abs=0.01)
        assert curved[case[0]][case[1]] < straight[case[0]][case[1]]
    assert all(each[8] == 0 for each in curved.values())


def test_the_whole_change_is_the_other_window():
    found, case = reference(60), (1, 16)
    shares, add = windows.new_shares(found, 0, [case])
    shares[case].data.fill_(1.0)
    with torch.no_grad():
        blended = found.read(0, KEEP, add=add)
    found.mechanisms[1].window = 16
    found.forget()
    with torch.no_grad():
        torch.testing.assert_close(found.read(0, KEEP), blended, atol=5e-3, rtol=1e-2)  # held in half precision


def test_windows_that_are_shared_out_take_no_more_memory_and_lose_less():
    found = reference(60, 90)
    even = geometric_mean(found.divergence(KEEP))
    shared = share_windows(found, KEEP, 8, nothing)
    groups = {0: 2, 1: 2}  # of two heads each: one of them keeps softmax, the other needs a state
    assert shared == {layer: m.window for layer, m in found.mechanisms.items()}
    assert sum(count * shared[layer] for layer, count in groups.items()) <= 8 * 4
    assert geometric_mean(found.divergence(KEEP)) <= even


def test_where_nothing_is_better_windows_stay_as_they_are(monkeypatch):
    found = reference(60)
    monkeypatch.setattr("attngap.conversion.windows.share_out", lambda *_: {0: 2, 1: 2})
    assert share_windows(found, KEEP, 8, nothing) == {0: 8, 1: 8}
    assert [m.window for m in found.mechanisms.values()] == [8, 8]


@pytest.fixture
def short(monkeypatch):
    """Long enough for slices at a length that a test can wait for."""
    monkeypatch.setattr(long_module, "ROWS", 16)
    monkeypatch.setattr(run_module, "long_enough", lambda *_: True)
    monkeypatch.setattr("attngap.conversion.calibration.FACTS", 2)
    return {"keep": 0.25, "window": 8, "sinks": 2, "context": 64, "tokens": 512, "length": 512, "steps": 4, "joint": 2}


def convert(directory, **options):
    return linearize(
        tiny(), tokenizer(), text=TEXT, measured=False, directory=directory, granularity="head", quiet=True, **options
    )


def test_a_saved_conversion_has_the_windows_it_was_given(short, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "share_windows", lambda reference, *_: give(reference, {0: 4, 1: 12}))
    converted, receipt = convert(tmp_path / "out", **short)
    assert receipt.windows == {0: 4, 1: 12} == Receipt.load(tmp_path / "out").windows
    loaded, _ = attngap.load(tmp_path / "out")
    assert [part.mechanism.window for part in mixed_heads(loaded).values()] == [4, 12]
    tokens = torch.randint(5, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, converted(tokens).logits)
    assert "4 to 12 tokens" in (tmp_path / "out" / "README.md").read_text()


def give(reference, windows):
    set_windows(reference.mechanisms, windows)
    reference.forget()
    return windows


def test_windows_are_the_same_in_all_layers_where_that_is_asked_for(short, tmp_path):
    converted, receipt = convert(None, **short, even_windows=True)
    assert receipt.windows == {}
    assert "sharing out windows" not in receipt.seconds
    assert {part.mechanism.window for part in mixed_heads(converted).values()} == {8}


def test_a_run_killed_after_windows_were_shared_out_goes_on_with_them(short, tmp_path, monkeypatch):
    whole, _ = convert(None, **short)

    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "fit_slices", die)
        with pytest.raises(Killed):
            convert(tmp_path / "out", **short)
    monkeypatch.setattr(run_module, "share_windows", die)  # it is not asked again
    resumed, _ = convert(tmp_path / "out", **short)
    tokens = torch.randint(5, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(resumed(tokens).logits, whole(tokens).logits)


def test_a_model_in_half_precision_gets_windows_too(short, monkeypatch):
    seen = []
    monkeypatch.setattr(run_module, "share_windows", lambda *given: seen.append(share_windows(*given)) or seen[0])
    model = tiny().to(torch.bfloat16)
    linearize(model, tokenizer(), text=TEXT, measured=False, granularity="head", quiet=True, **short)
    assert set(seen[0]) == {0, 1}
