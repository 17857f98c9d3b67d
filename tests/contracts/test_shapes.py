"""Any shape, any mask, any cut: the forms still agree."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngap import catalogue, mechanism
from attngap.mechanisms import contracts

from .cases import default_options


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(catalogue()),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    batch=st.integers(1, 2),
    length=st.integers(1, 19),
    seed=st.integers(0, 99),
    real=st.sampled_from((1.0, 0.7)),
    cut=st.integers(0, 18),
    chunk=st.integers(1, 7),
)
def test_forms_and_pieces_agree(name, kv_heads, group, dims, batch, length, seed, real, cut, chunk):
    m = mechanism(name, kv_heads * group, *dims, kv_heads=kv_heads, **default_options(name))
    # A mean above zero keeps the normalizers of signed features away from zero.
    case = contracts.make_case(m, length=length, batch=batch, seed=seed, mean=1.0)
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) <= real
    m = case.mechanism
    streams = m.read(case.x, case.q, case.k, case.v, mask=mask)
    expected, state = contracts.run_steps(m, streams)
    tolerance = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(m.parallel(streams), expected, **tolerance)
    torch.testing.assert_close(m.chunked(streams, chunk=chunk)[0], expected, **tolerance)
    if 0 < cut < length:
        before, first = m.chunked(streams.slice(0, cut))
        after, last = m.chunked(streams.slice(cut, streams.length), first)
        torch.testing.assert_close(torch.cat([before, after], 2), expected, **tolerance)
        torch.testing.assert_close(last, state, **tolerance)
