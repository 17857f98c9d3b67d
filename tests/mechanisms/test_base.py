import pytest
import torch

import attngap
from attngap.errors import AttngapError
from attngap.mechanisms.base import Streams
from attngap.mechanisms.contracts import make_case, run_steps


def tensors(heads=2, kv_heads=2, length=5, dim=4, value_dim=4, dtype=torch.float32):
    shapes = ((2, heads, length, dim), (2, kv_heads, length, dim), (2, kv_heads, length, value_dim))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def refused(call, message):
    with pytest.raises(AttngapError) as caught:
        call()
    assert str(caught.value) == message


def test_read_refuses_wrong_shapes():
    m = attngap.mechanism("elu", 2, 4)
    q, k, v = tensors()
    refused(lambda: m.read(None, q[0], k, v), "elu: q must have 4 axes (b, heads, t, dim), got shape (2, 5, 4)")
    refused(lambda: m.read(None, q[:, :1], k, v), "elu: q must have shape (2, 2, 5, 4), got (2, 1, 5, 4)")
    refused(lambda: m.read(None, q, k[:, :, 1:], v), "elu: k must have shape (2, 2, 5, 4), got (2, 2, 4, 4)")
    refused(lambda: m.read(None, q, k[:1], v), "elu: k must have shape (2, 2, 5, 4), got (1, 2, 5, 4)")
    refused(lambda: m.read(None, q, k, v[..., 1:]), "elu: v must have shape (2, 2, 5, 4), got (2, 2, 5, 3)")
    none = [x[:, :, :0] for x in (q, k, v)]
    refused(lambda: m.read(None, *none), "elu: q must hold at least one token, got length 0")


def test_read_refuses_other_types_and_masks():
    m = attngap.mechanism("elu", 2, 4)
    q, k, v = tensors()
    message = "elu: v must match q (torch.float32 on cpu), got torch.float64 on cpu"
    refused(lambda: m.read(None, q, k, v.double()), message)
    message = "elu: k must match q (torch.float32 on cpu), got torch.float32 on meta"
    refused(lambda: m.read(None, q, k.to("meta"), v), message)
    mask = torch.ones(2, 4, dtype=torch.bool)
    refused(lambda: m.read(None, q, k, v, mask=mask), "elu: mask must have shape (2, 5), got (2, 4)")


def test_gates_need_the_layers_input():
    m = attngap.mechanism("gla", 2, 4)
    q, k, v = tensors()
    message = "gla: its gates are computed from x, the layer's input (b, t, m); got None"
    refused(lambda: m.read(None, q, k, v), message)
    message = "gla: x must have 8 channels, got 6; set the option model_dim"
    refused(lambda: m.read(torch.randn(2, 5, 6), q, k, v), message)


@pytest.mark.parametrize("name", ["softmax", "elu", "inline"])
def test_bidirectional_mechanisms_have_no_recurrent_form(name):
    m = attngap.mechanism(name, 2, 4, causal=False)
    streams = m.read(None, *tensors())
    tail = "needs causal=True; with causal=False use parallel or chunked"
    refused(lambda: m.init_state(streams), f"{name}: init_state {tail}")
    refused(lambda: m.step({}, streams), f"{name}: step {tail}")
    _, state = attngap.mechanism(name, 2, 4).chunked(streams)
    refused(lambda: m.chunked(streams, state), f"{name}: a carried state {tail}")


@pytest.mark.parametrize("name", ["elu", "delta"])
@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_ops_name_the_input_that_is_not_finite(name, poison):
    m = attngap.mechanism(name, 2, 4)
    q, k, v = tensors()
    v[0, 0, 2, 1] = float(poison)
    with pytest.raises(AttngapError, match=r"v holds (NaN|infinite values)"):
        m(torch.randn(2, 5, 8), q, k, v)


def test_a_chunk_of_zero_is_refused():
    with pytest.raises(AttngapError, match="chunk must be at least 1, got 0"):
        attngap.mechanism("elu", 2, 4)(None, *tensors(), chunk=0)


def test_streams_of_another_mechanism_are_refused():
    plain = attngap.mechanism("elu", 2, 4).read(None, *tensors())
    with pytest.raises(AttngapError, match="hybrid: these streams have no far features"):
        attngap.mechanism("hybrid", 2, 4).chunked(plain)
    with pytest.raises(AttngapError, match="delta: these streams have no beta"):
        attngap.mechanism("delta", 2, 4).weights(plain)


def test_slice_cuts_every_stream_along_time():
    case = make_case(attngap.mechanism("gated-delta", 2, 4), length=9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    streams = case.mechanism.read(case.x, case.q, case.k, case.v, mask=mask)
    cut = streams.slice(2, 6)
    assert cut.length == 4
    assert (cut.log_decay.shape, cut.beta.shape, cut.mask.shape) == ((2, 2, 4), (2, 2, 4), (2, 4))
    assert torch.equal(cut.k, streams.k[:, :, 2:6])
    assert cut.fq is None


def test_streams_are_wide_where_they_were_half():
    q, k, v = tensors(dtype=torch.bfloat16)
    wide = Streams(q, k, v, mask=torch.ones(2, 5, dtype=torch.bool)).wide()
    assert wide.q.dtype == wide.v.dtype == torch.float32
    assert wide.mask.dtype == torch.bool


def test_positions_go_on_where_the_last_piece_ended():
    """cosformer's weights depend on the position: `start` continues it, for each sequence if they differ."""
    m = attngap.mechanism("cosformer", 2, 4, length=20).double()
    case = make_case(m, length=8)
    whole = case.streams()
    torch.testing.assert_close(case.streams(3, 8).k, whole.k[:, :, 3:])
    starts = torch.tensor([3, 5])
    both = m.read(None, case.q[:, :, :2], case.k[:, :, :2], case.v[:, :, :2], start=starts)
    alone = m.read(None, case.q[1:, :, :2], case.k[1:, :, :2], case.v[1:, :, :2], start=5)
    torch.testing.assert_close(both.k[1:], alone.k)


@pytest.mark.parametrize("name", ["elu", "delta", "hybrid", "softmax"])
def test_gradients_flow_through_a_carried_state(name):
    """Training in pieces: the loss of the second piece reaches the values of the first."""
    options = {"window": 2, "sinks": 1} if name == "hybrid" else {}
    case = make_case(attngap.mechanism(name, 2, 4, **options), length=8)
    m, grads = case.mechanism, []
    for pieces in (False, True):
        v = case.v.clone().requires_grad_()
        if pieces:
            first, state = m.chunked(case.streams(0, 5, v=v))
            second, _ = m.chunked(case.streams(5, 8, v=v), state)
            out = torch.cat([first, second], 2)
        else:
            out = run_steps(m, case.streams(v=v))[0]
        grads.append(torch.autograd.grad((out[:, :, 5:] ** 2).sum(), v)[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_repr_says_what_it_is():
    text = repr(attngap.mechanism("hedgehog", 4, 8, kv_heads=2))
    assert text.startswith("Hedgehog(\n  heads=4, dim=8, value_dim=8, kv_heads=2")
