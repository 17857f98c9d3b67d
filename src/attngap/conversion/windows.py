"""A window for each layer: what a cache pays for is their sum, and few layers need what is just beyond the mean.

With the heads chosen and the features fitted, a layer's window may shrink to a quarter or grow to three times the mean.
What each of these does is estimated for all layers at once, to second order, on slices of text near and far; the best
combination that takes no more memory is then measured, and taken if the divergence is lower.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attngap.conversion.joint import divergence, geometric_mean
from attngap.conversion.slices import HELD, Add, SliceReference, state_of
from attngap.heads.choice import Keep
from attngap.heads.damage import label_directions
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.capture import Call
from attngap.models.placement import device_of

SIZES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the mean window
Windows = dict[int, int]  # by layer
Case = tuple[int, int]  # a layer and a window


def share_windows(reference: SliceReference, keep: Keep, window: int, advance: Callable[..., None]) -> Windows:
    """The windows of the layers that have replaced heads, `window` on average, set in the reference's replacements.

    Where no other choice than the same one for all was found better, it is that.
    """
    mechanisms = reference.mechanisms
    groups = {layer: held_groups(m, layer, keep) for layer, m in mechanisms.items()}
    even = {layer: window for layer, count in groups.items() if count}
    sizes = sorted({max(1, round(size * window)) for size in SIZES} | {window})
    gains, before = window_gains(reference, keep, even, sizes, advance)
    chosen = share_out(gains, groups, window)
    set_windows(mechanisms, chosen)
    reference.forget()
    if geometric_mean(reference.divergence(keep)) < geometric_mean(before):
        return chosen
    set_windows(mechanisms, even)
    reference.forget()
    return even


def held_groups(mechanism: Mechanism, layer: int, keep: Keep) -> int:
    """Key heads that some replaced head reads."""
    size = mechanism.heads // mechanism.kv_heads
    return len({head // size for head in range(mechanism.heads) if (layer, head) not in keep})


def set_windows(mechanisms: Mapping[int, Mechanism], windows: Windows) -> None:
    for layer, window in windows.items():
        _hybrid(mechanisms[layer]).window = window


def _hybrid(mechanism: Mechanism) -> Hybrid:
    assert isinstance(mechanism, Hybrid), "slices, which windows are chosen by, need hybrids"
    return mechanism


def window_gains(
    reference: SliceReference,
    keep: Keep,
    now: Windows,
    sizes: Sequence[int],
    advance: Callable[..., None],
    *,
    seed: int = 0,
) -> tuple[dict[int, dict[int, float]], Float[Tensor, " count"]]:
    """By layer and window: the share of the divergence that this window would take off there, all others as now.

    With a the share of the other window's output, o = o_now + a (o_other - o_now), the divergence is expanded to second
    order in a, as it is for softmax in `attngap.conversion.choose`. One reading of a slice serves all layers. The
    divergences as they are now come along.
    """
    generator = torch.Generator().manual_seed(seed)
    cases = [(layer, size) for layer, window in now.items() for size in sizes if size != window]
    total, losses = dict.fromkeys(cases, 0.0), []
    for place, teacher in reference.pairs():
        gains, loss = _gains_on(reference, place, teacher, keep, cases, generator)
        for case, gain in gains.items():
            total[case] += gain / max(float(loss), 1e-9) / len(reference.pieces)
        losses.append(loss)
        advance()
    found = {layer: {now[layer]: 0.0} | {s: total[c, s] for c, s in cases if c == layer} for layer in now}
    return found, torch.stack(losses)


def _gains_on(
    reference: SliceReference,
    place: int,
    teacher: Tensor,
    keep: Keep,
    cases: Sequence[Case],
    generator: torch.Generator,
) -> tuple[dict[Case, float], Float[Tensor, ""]]:
    """What each case takes off the divergence of one slice, and the divergence."""
    shares, add = new_shares(reference, place, cases)
    with reference.frozen(), torch.enable_grad():
        out = reference.read(place, keep, add=add)
        loss = divergence(out, teacher, is_language_model=True)
        slopes = torch.autograd.grad(loss, list(shares.values()), retain_graph=True)
        (direction,) = label_directions(out.detach(), generator)
        second = torch.autograd.grad(out, list(shares.values()), direction)
    curved = [float(each.square().sum()) / out.shape[1] / 2 for each in second]
    gains = {c: -float(slope.sum()) - more for c, slope, more in zip(cases, slopes, curved, strict=True)}
    return gains, loss.detach()


def new_shares(reference: SliceReference, place: int, cases: Sequence[Case]) -> tuple[dict[Case, Tensor], Add]:
    """Zeros that gradients are wanted for, one for each case and token, and what adds their changes to a layer."""
    past, start, stop = reference.pieces[place]
    device = device_of(reference.original)
    shares = {case: torch.zeros(stop - start, device=device, requires_grad=True) for case in cases}
    changes: dict[Case, Tensor] = {}  # a backward pass reads a layer again

    def add(call: Call, kept: Tensor, replaced: Tensor) -> Tensor | None:
        found = None
        for case in (each for each in cases if each[0] == call.layer):
            if case not in changes:
                with torch.no_grad():
                    other = _hybrid(reference.mechanisms[call.layer]).with_window(case[1])
                    state = state_of(other, past.layers[call.layer], start)
                    read = other.read(None, call.q, call.k, call.v, start=start, rotary=call.rotary)
                    change = (other.chunked(read, state)[0] - replaced).masked_fill(kept[:, None, None], 0.0)
                    changes[case] = change.to(HELD)
            more = shares[case].to(call.q.device)[:, None] * changes[case].float()
            found = more if found is None else found + more
        return found

    return shares, add


def share_out(gains: Mapping[int, Mapping[int, float]], groups: Mapping[int, int], window: int) -> Windows:
    """The windows of largest gain that hold no more keys in all than with `window` everywhere, found exactly.

    A wider window cannot lose what a narrower one has, so an estimate that says so is taken for noise.
    """
    budget = window * sum(groups[layer] for layer in gains)
    unit = int(np.gcd.reduce([size for each in gains.values() for size in each]))
    room = budget // unit
    best = np.full(room + 1, -np.inf)  # the largest gain of the layers so far, by what they hold
    best[0] = 0.0
    taken: list[tuple[int, np.ndarray]] = []
    for layer, each in gains.items():
        tried, choice = np.full(room + 1, -np.inf), np.zeros(room + 1, int)
        for size, gain in _rising(each, window).items():
            cost = groups[layer] * size // unit
            if cost > room:
                continue
            after = np.full(room + 1, -np.inf)
            after[cost:] = best[: room + 1 - cost] + gain
            choice, tried = np.where(after > tried, size, choice), np.maximum(after, tried)
        best = tried
        taken.append((layer, choice))
    held, found = int(best.argmax()), {}
    for layer, choice in reversed(taken):
        found[layer] = int(choice[held])
        held -= groups[layer] * found[layer] // unit
    return dict(sorted(found.items()))


def _rising(gains: Mapping[int, float], window: int) -> dict[int, float]:
    """Gains that never fall as windows grow: from the present one outward, the most that was seen on the way."""
    found = {window: 0.0}
    for sizes in (sorted(s for s in gains if s > window), sorted((s for s in gains if s < window), reverse=True)):
        last = 0.0
        for size in sizes:
            last = max(last, gains[size]) if size > window else min(last, gains[size])
            found[size] = last
    return found
