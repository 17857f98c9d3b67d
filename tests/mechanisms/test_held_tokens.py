"""States that hold some tokens of a prompt exactly, beside sinks and window, against weights written out."""

import pytest
import torch

from attngap.errors import AttngapError
from attngap.mechanisms.decoding import decoder
from attngap.mechanisms.held import hold, release, token_step
from attngap.ops.pairs import expand_heads
from tests.mechanisms.test_held import KV, LLAMA, WINDOW, B, H, angles, cut, made, streams, turn

PROMPT, MORE = 24, 9
HELD = torch.tensor([[3, 7, 11], [2, 4, 18]]).expand(B, KV, 3)  # of each key head, between 2 sinks and the window


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")


def written_out(found, x, rotary):
    """The rows after the prompt, from all weights: held keys count as near."""
    q, k, v = x
    t = q.shape[2]
    streams = found.read(None, *x, rotary=rotary)
    fq, fk = streams.fq, expand_heads(streams.fk, H)
    i, j = torch.arange(t)[:, None], torch.arange(t)
    near = ((j < found.sinks) | (j > i - WINDOW)).expand(B, H, t, t).clone()
    for head in range(H):
        near[:, head, :, HELD[0, head // (H // KV)]] = True
    logits = (q @ expand_heads(k, H).mT * found.scale).masked_fill(~near | (j > i), -torch.inf)
    lift = streams.log_gain[..., None]
    lift = lift + logits.amax(-1, keepdim=True) if found.relative else lift
    far = (fq @ fk.mT * lift.exp()).masked_fill(near | (j > i), 0.0)
    weights = logits.exp() + far
    return (weights / weights.sum(-1, keepdim=True) @ expand_heads(v, H))[:, :, PROMPT:]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("layout", [None, LLAMA])
def test_held_tokens_are_read_exactly_and_once(relative, layout):
    found, x = made(layout, relative=relative), streams(PROMPT + MORE)
    rotary = None if layout is None else angles(PROMPT + MORE, 6)
    state = found.state_after(*cut(x, 0, PROMPT)[1:], turn(rotary, 0, PROMPT), HELD)
    wider = found.with_sinks(found.sinks + 3)
    wanted = written_out(found, x, rotary)
    given = {"start": PROMPT, "rotary": turn(rotary, PROMPT, None)}
    out, _ = wider.chunked(wider.read(None, *cut(x, PROMPT, None), **given), dict(state))
    torch.testing.assert_close(out, wanted)
    one = dict(state)
    for i in range(MORE):  # the window moves past the prompt's end, whose tokens leave it
        here = {"start": PROMPT + i, "rotary": turn(rotary, PROMPT + i, PROMPT + i + 1)}
        row, one = wider.step(one, wider.read(None, *cut(x, PROMPT + i, PROMPT + i + 1), **here))
        torch.testing.assert_close(row, wanted[:, :, i : i + 1])
    alone = found.chunked(
        found.read(None, *cut(x, PROMPT, None), **given),
        found.state_after(*cut(x, 0, PROMPT)[1:], turn(rotary, 0, PROMPT)),
    )
    assert (alone[0] - wanted).abs().max() > 1e-3  # without them it is something else


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_holds_them_token_after_token(compiled):
    found, x, rotary = made(LLAMA), streams(PROMPT + MORE), angles(PROMPT + MORE, 6)
    wider = found.with_sinks(found.sinks + 3)
    state = found.state_after(*cut(x, 0, PROMPT)[1:], turn(rotary, 0, PROMPT), HELD)
    held = {name: y.contiguous() for name, y in hold(wider, state, turn(rotary, 0, PROMPT)).items()}
    for name, y in release(wider, dict(held)).items():
        torch.testing.assert_close(y, state[name])
    wanted, position = written_out(found, x, rotary), torch.full((B,), PROMPT)
    call = decoder(wider, held, torch.full((H,), -1), position, turn(rotary, PROMPT, PROMPT + 1)) if compiled else None
    assert (call is not None) == compiled
    for i in range(MORE):
        now, turned = cut(x, PROMPT + i, PROMPT + i + 1), turn(rotary, PROMPT + i, PROMPT + i + 1)
        if call is not None:
            out = call.token(*now, turned, None, None).transpose(1, 2)
        else:
            streams_now = wider.read(None, *now, start=PROMPT + i, rotary=turned)
            out = token_step(wider, streams_now, held, turned, None)
        torch.testing.assert_close(out, wanted[:, :, i : i + 1])


def test_more_than_lie_between_sinks_and_window_are_refused():
    found, x = made(), streams(WINDOW + 4)
    with pytest.raises(AttngapError, match="3 tokens cannot be held of 2 beyond sinks and window"):
        found.state_after(*x[1:], None, HELD)
