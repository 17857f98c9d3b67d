"""The laws, over the whole catalogue; and a broken mechanism for each, which must be caught."""

import re

import pytest
import torch
from torch import nn

from attngap import catalogue, mechanism
from attngap.mechanisms import contracts
from attngap.mechanisms.variants.elu import Elu
from attngap.mechanisms.variants.retention import Retention

from .cases import CASES, build, default_options, label


@pytest.mark.parametrize("law", contracts.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_law_holds(case, law):
    law(contracts.make_case(build(case)))


def test_every_key_of_the_catalogue_is_checked():
    assert {name for name, _ in CASES} >= set(catalogue())


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "softmax"])
def test_declared_rank_is_reached(name):
    """The bound is not only valid but the best one: random inputs reach it."""
    case = contracts.make_case(mechanism(name, 2, 4, **default_options(name)), length=contracts.LONG)
    weights = case.mechanism.weights(case.streams()).detach()
    assert weights.shape[-1] - 20 > case.mechanism.state_rank(20), "the block must be able to exceed the bound"
    rank = int(torch.linalg.matrix_rank(weights[..., 20:, :21], rtol=1e-9).max())
    assert rank == case.mechanism.state_rank(20)


@pytest.mark.parametrize("name", catalogue())
def test_gradcheck(name):
    case = contracts.make_case(mechanism(name, 2, 2, 3, kv_heads=1, **default_options(name)), length=6, batch=1, seed=2)
    inputs = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    gate = [] if case.x is None else [case.x.requires_grad_()]

    def mix(q, k, v, *x):
        return case.mechanism(x[0] if x else None, q, k, v)[0]

    assert torch.autograd.gradcheck(mix, (*inputs, *gate))


class ScaledChunks(Elu):
    def chunked(self, streams, state=None, chunk=None):
        out, state = super().chunked(streams, state, chunk)
        return out * (1 + 1e-8), state


class CutGradient(Elu):
    def chunked(self, streams, state=None, chunk=None):
        return super().chunked(streams.replace(k=streams.k.detach()), state, chunk)


class RoughMix(Elu):
    def mix(self, x, q, k, v, *, mask=None):
        return super().mix(x, q, k, v, mask=mask) * (1 + 1e-8)


class ForgetfulChunks(Elu):
    def chunked(self, streams, state=None, chunk=None):
        return super().chunked(streams, None, chunk)


class LooksAhead(Elu):
    def encode(self, x, q, k, v, position, mask):
        return super().encode(x, q + k.mean(2, keepdim=True), k, v, position, mask)


class CurvedInV(Elu):
    def encode(self, x, q, k, v, position, mask):
        return super().encode(x, q, k, v.abs(), position, mask)


class IgnoresMask(Elu):
    def encode(self, x, q, k, v, position, mask):
        return super().encode(x, q, k, v, position, None)


class TooFewFloats(Elu):
    def state_floats(self, t):
        return super().state_floats(t) - 1


class TooLowRank(Elu):
    def state_rank(self, t):
        return min(self.width - 1, t + 1)


class DoubledRows(Elu):
    def weights(self, streams):
        return 2 * super().weights(streams)


class HiddenNormalization(Retention):
    def weights(self, streams):
        weights = super().weights(streams)
        return weights / weights.sum(-1, keepdim=True)


class OtherChunks(Elu):
    def chunked(self, streams, state=None, chunk=None):
        out, state = super().chunked(streams, state, chunk)
        return out + 1e-6, state


class UnusedParameter(Elu):
    learned = True

    def __init__(self, heads, dim, value_dim=None):
        super().__init__(heads, dim, value_dim)
        self.idle = nn.Parameter(torch.ones(()))

    def encode(self, x, q, k, v, position, mask):
        return super().encode(x, q + 0 * self.idle, k, v, position, mask)


class Undeclared(Elu):
    def __init__(self, heads, dim, value_dim=None):
        super().__init__(heads, dim, value_dim)
        self.gain = nn.Parameter(torch.ones(()))


class LoadsNothing(Elu):
    learned = True

    def __init__(self, heads, dim, value_dim=None):
        super().__init__(heads, dim, value_dim)
        self.gain = nn.Parameter(torch.ones(dim))

    def encode(self, x, q, k, v, position, mask):
        return super().encode(x, q * self.gain, k, v, position, mask)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return None


class StaleMemory(Elu):
    def chunked(self, streams, state=None, chunk=None):
        out, state = super().chunked(streams, state, chunk)
        return out + 0 * torch.empty_like(out), state


class CoarseHalf(Elu):
    def chunked(self, streams, state=None, chunk=None):
        out, state = super().chunked(streams, state, chunk)
        return out * 1.1 if out.dtype == torch.bfloat16 else out, state


BROKEN = [
    (contracts.forms_agree, ScaledChunks, "chunked against step: off by"),
    (contracts.gradients_agree, CutGradient, "gradient of k, chunked against step"),
    (contracts.mix_agrees, RoughMix, "mix of 6 tokens against parallel: off by"),
    (contracts.state_carries, ForgetfulChunks, "output with cuts at (1,): off by"),
    (contracts.past_only, LooksAhead, "rows before 10 after tokens from 10 on were changed"),
    (contracts.linear_in_v, CurvedInV, "step: off by"),
    (contracts.padding_is_neutral, IgnoresMask, "with 3 tokens of padding before and 0 after"),
    (
        contracts.floats_as_declared,
        TooFewFloats,
        "state after 1 tokens by step holds 64 floats; state_floats declares 60",
    ),
    (contracts.rank_as_declared, TooLowRank, "W[3:, :4] has rank 4; state_rank(3) declares 3"),
    (contracts.rows_sum_as_declared, DoubledRows, "normalized, but a row sums to one only within 1"),
    (contracts.rows_sum_as_declared, HiddenNormalization, "not declared normalized, but every row sums to one"),
    (contracts.weights_are_the_mixing, OtherChunks, "chunked on the identity: off by"),
    (contracts.parameters_as_declared, UnusedParameter, "parameter idle gets no gradient"),
    (contracts.parameters_as_declared, Undeclared, "learned=False, but there are 1 parameter tensors"),
    (contracts.state_dict_round_trip, LoadsNothing, "output after loading: off by"),
    (contracts.no_stale_memory, StaleMemory, "chunked with poisoned buffers: off by nan"),
    (contracts.half_precision, CoarseHalf, "bfloat16, chunked: off by"),
]


@pytest.mark.parametrize(("law", "broken", "message"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_law_catches(law, broken, message):
    with pytest.raises(contracts.BrokenContractError, match=re.escape(message)):
        law(contracts.make_case(broken(2, 4, 3)))


def test_every_law_is_seen_failing():
    assert {law for law, _, _ in BROKEN} == set(contracts.LAWS)


def test_check_names_mechanism_and_law():
    contracts.check(Elu(2, 4))
    with pytest.raises(contracts.BrokenContractError, match=r"^elu breaks rank_as_declared: W"):
        contracts.check(TooLowRank(2, 4))
