"""RMS norms of converted models, one token at a time, beside transformers' own."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from attngap.models.norms import Norm, norm_of
from attngap.models.products import compile_products, plain_products, quick_products
from attngap.models.swap import swap
from attngap.models.twin import undone
from attngap.ops import native
from attngap.ops.rms import RmsWeight
from tests.zoo import mechanisms, tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")


@pytest.fixture
def taken(monkeypatch):
    """How many norms were compiled ones."""
    counts = {"normalized": 0}
    normalized = RmsWeight.normalized

    def counted(self, x):
        counts["normalized"] += 1
        return normalized(self, x)

    monkeypatch.setattr(RmsWeight, "normalized", counted)
    return counts


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_weight(norm: nn.Module) -> nn.Module:
    norm.weight.data = drawn(*norm.weight.shape, seed=1)
    return norm


class AddsEps(LlamaRMSNorm):
    """eps outside of the root."""

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class InTraining(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class Wants(LlamaRMSNorm):
    def forward(self, x):
        raise KeyError("something else")


class WithGate(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


RMS = [LlamaRMSNorm(64), LlamaRMSNorm(64, eps=1e-5), Qwen3RMSNorm(64), T5LayerNorm(64), nn.RMSNorm(64, eps=1e-6)]
NOT_RMS = [
    GemmaRMSNorm(64),  # weight + 1
    CohereLayerNorm(64, eps=1e-5),
    nn.LayerNorm(64, bias=False),
    nn.LayerNorm(64),
    nn.RMSNorm(64),  # an eps of the type's own
    nn.Linear(64, 64),
    nn.PReLU(64),
    AddsEps(64),
    InTraining(64),
    Wants(64),
    WithGate(64),
]


@pytest.mark.parametrize("norm", RMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (4, 1, 64), (1, 1, 9, 64)])
def test_equals_the_module(norm, dtype, shape, taken):
    norm, x = with_weight(copy.deepcopy(norm)).to(dtype), drawn(*shape).to(dtype)
    compile_products(quick := copy.deepcopy(norm))
    assert isinstance(quick.forward, Norm)
    with torch.no_grad():
        found, expected = quick(x), norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, **({"atol": 0, "rtol": 0} if dtype == torch.bfloat16 else {}))
    assert taken["normalized"] == (dtype == torch.float32)


@pytest.mark.parametrize("norm", NOT_RMS, ids=lambda norm: type(norm).__name__)
def test_others_are_left_alone(norm):
    for weight in (None, 0.0, 1.0):
        if weight is not None:
            nn.init.constant_(norm.weight, weight)
        assert norm_of(norm) is None


def test_what_is_elsewhere_is_left_alone():
    assert norm_of(LlamaRMSNorm(64).to("meta")) is None


def test_trying_a_module_leaves_it_as_it_was():
    norm = with_weight(LlamaRMSNorm(64))
    before, weight, written = dict(vars(norm)), norm.weight, norm.weight._version
    assert norm_of(norm)
    assert vars(norm) == before
    assert norm.weight is weight
    assert weight._version == written


@pytest.mark.parametrize(
    "x",
    [
        drawn(1, 64, 3).mT,
        drawn(1, 3, 64),
        drawn(1, 3, 1, 64),
        drawn(1, 64),
        drawn(1, 1, 128)[..., ::2],
        drawn(1, 300, 64),
        drawn(2, 1, 64).double(),
    ],
)
def test_what_is_not_a_token_is_the_modules(x, taken):
    norm = with_weight(LlamaRMSNorm(64))
    with torch.no_grad():
        expected = norm(x)
        compile_products(norm)
        assert torch.equal(norm(x), expected)
    assert not taken["normalized"]


def test_odd_widths_are_the_modules(taken):
    norm, x = with_weight(LlamaRMSNorm(57)), drawn(1, 1, 57)
    with torch.no_grad():
        expected = norm(x)
        compile_products(norm)
        assert torch.equal(norm(x), expected)
    assert not taken["normalized"]


def test_gradients_transforms_and_no_kernels_are_the_modules(taken):
    norm, x = with_weight(LlamaRMSNorm(64)), drawn(1, 1, 64)
    compile_products(norm)
    norm(x).sum().backward()
    assert norm.weight.grad is not None
    with torch.no_grad():
        torch.vmap(norm)(drawn(5, 1, 64))
        with native.off():
            norm(x)
    assert not taken["normalized"]


def test_names_of_arguments_stay():
    norm, x = with_weight(LlamaRMSNorm(64)), drawn(1, 1, 64)
    compile_products(norm)
    with torch.no_grad():
        assert torch.equal(norm(hidden_states=x), type(norm).forward(norm, x))
    assert list(inspect.signature(norm.forward).parameters) == ["hidden_states"]


def test_training_casting_and_another_eps_are_seen(taken):
    norm, x = with_weight(LlamaRMSNorm(64)), 1e-3 * drawn(1, 1, 64)
    compile_products(norm)
    with torch.no_grad():
        norm(x)
        norm.weight.mul_(2)
        torch.testing.assert_close(norm(x), type(norm).forward(norm, x))
        norm.variance_epsilon = 1e-2
        torch.testing.assert_close(norm(x), type(norm).forward(norm, x))
        norm.weight = nn.Parameter(drawn(64, seed=3))
        torch.testing.assert_close(norm(x), type(norm).forward(norm, x))
        assert taken["normalized"] == 4
        norm.double()
        assert torch.equal(norm(x.double()), type(norm).forward(norm, x.double()))
        norm.float()
        torch.testing.assert_close(norm(x), type(norm).forward(norm, x))
        assert taken["normalized"] == 5


def test_copies_norm_with_their_own_weights():
    norm, x = with_weight(LlamaRMSNorm(64)), drawn(1, 1, 64)
    compile_products(norm)
    with torch.no_grad():
        before = norm(x)
        for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            other.weight.zero_()
            assert float(other(x).abs().max()) == 0
        assert torch.equal(norm(x), before)


def norms(model: nn.Module) -> int:
    return sum(isinstance(vars(part).get("forward"), Norm) for part in model.modules())


def test_converted_models_have_them_and_originals_do_not(taken):
    original = tiny("qwen3")
    converted = swap(original, {layer: (m, [1]) for layer, m in mechanisms(original).items()})
    assert norms(converted) == 2 * 4 + 1
    assert not norms(original)
    assert not norms(undone(converted))
    tokens = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = converted(tokens[:, :23], use_cache=True).past_key_values
        taken["normalized"] = 0
        last = converted(tokens[:, 23:], past_key_values=cache, use_cache=True).logits[0, -1]
        assert taken["normalized"] == 2 * 2 + 1  # those of heads are too narrow here
        plain_products(converted)
        assert not norms(converted)
        torch.testing.assert_close(last, converted(tokens, use_cache=False).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_an_original_norms_quickly_for_a_while():
    model = tiny()
    with quick_products(model):
        assert norms(model) == 5
        with quick_products(model):
            pass
        assert norms(model) == 5
    assert not norms(model)
