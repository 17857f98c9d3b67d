import inspect
from importlib.metadata import EntryPoint

import pytest
import torch

import attngap
from attngap import mechanism as make
from attngap.errors import AttngapError
from attngap.mechanisms import catalogue as module
from attngap.mechanisms import contracts
from attngap.mechanisms.variants.elu import Elu

NAMES = (
    *("softmax", "linear", "elu", "relu", "polynomial", "taylor", "favor", "rff", "cosformer", "hedgehog", "prototype"),
    *("inline", "mala", "retention", "gla", "ssd", "delta", "gated-delta", "kda", "hybrid"),
)


def test_names():
    assert sorted(attngap.catalogue()) == sorted(NAMES)


@pytest.mark.parametrize("cls", module.MECHANISMS, ids=lambda cls: cls.name)
def test_key_is_file_is_class(cls):
    """`gated-delta` is `GatedDelta` in `gated_delta.py`, with a formula and a paper in its docstring."""
    assert cls.__module__ == f"attngap.mechanisms.variants.{cls.name.replace('-', '_')}"
    assert cls.__name__ == "".join(part.capitalize() for part in cls.name.split("-"))
    assert "=" in cls.__doc__ or "~" in cls.__doc__
    assert cls.paper in cls.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_options_are_named_in_the_signature(name):
    """Nothing is swallowed: no *args or **kwargs in what users call, except what a family hands to its own map."""
    cls = module.mechanism_class(name)
    own = inspect.signature(cls).parameters.values()
    assert not any(p.kind is p.VAR_POSITIONAL for p in own)
    with pytest.raises(AttngapError, match=f"No {name} option 'degre'"):
        attngap.mechanism(name, 2, 4, degre=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: make("gal", 2, 4),
            "No mechanism 'gal'. Did you mean 'gla'? List them: attngap mechanisms",
        ),
        (lambda: make("zzz", 2, 4), "No mechanism 'zzz'. List them: attngap mechanisms"),
        (
            lambda: make("polynomial", 2, 4, degre=2),
            "No polynomial option 'degre'. Did you mean 'degree'? Allowed: degree, kv_heads, causal",
        ),
        (lambda: make("gla", 2, 4, causal=False), "No gla option 'causal'. Allowed: model_dim, kv_heads"),
        (lambda: make("elu", 0, 4), "elu: heads must be a whole number of at least 1, got 0"),
        (lambda: make("elu", 2, -4), "elu: dim must be a whole number of at least 1, got -4"),
        (lambda: make("elu", 2, 4, 0), "elu: value_dim must be a whole number of at least 1, got 0"),
        (
            lambda: make("elu", 4, 4, kv_heads=3),
            "elu: kv_heads must divide heads, got kv_heads=3, heads=4",
        ),
        (
            lambda: make("kda", 2, 4, model_dim=0),
            "kda: model_dim must be a whole number of at least 1, got 0",
        ),
        (lambda: make("hybrid", 2, 4, window=0), "hybrid: window must be at least 1, got 0"),
        (lambda: make("hybrid", 2, 4, sinks=-1), "hybrid: sinks must be at least 0, got -1"),
        (
            lambda: make("hybrid", 2, 4, gain="heads"),
            "No hybrid gain 'heads'. Did you mean 'head'? Allowed: none, head, query",
        ),
        (
            lambda: make("hybrid", 2, 4, feature_map="favour"),
            "No feature map 'favour'. Did you mean 'favor'? Allowed: ",
        ),
        (
            lambda: make("hybrid", 2, 4, feature_map="favor", map_options={"feature": 3}),
            "No favor map option 'feature'. Did you mean 'features'? Allowed: features, seed",
        ),
    ],
)
def test_refuses_in_one_line(call, message):
    with pytest.raises(AttngapError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


class Doubled(Elu):
    name = "doubled"

    def encode(self, x, q, k, v, position, mask):
        return super().encode(x, 2 * q, k, v, position, mask)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that other packages registered these entry points."""

    def install(**values):
        points = [EntryPoint(name.replace("_", "-"), value, module.GROUP) for name, value in values.items()]
        monkeypatch.setattr(module, "entry_points", lambda group: points if group == module.GROUP else [])
        module.plugins.cache_clear()

    yield install
    module.plugins.cache_clear()


def test_mechanisms_of_other_packages(installed):
    installed(doubled=f"{__name__}:Doubled")
    assert attngap.catalogue()[-1] == "doubled"
    m = attngap.mechanism("doubled", 2, 4, kv_heads=1)
    assert m.state_floats(3) == attngap.mechanism("elu", 2, 4).state_floats(3)
    contracts.forms_agree(contracts.make_case(m))


def test_a_broken_plugin_is_named_and_harms_nobody_else(installed):
    installed(missing="no_such_package:Thing", wrong="math:sqrt")
    assert attngap.catalogue()[-2:] == ("missing", "wrong")
    assert attngap.mechanism("elu", 2, 4).name == "elu"
    with pytest.raises(AttngapError, match="'missing' comes from no_such_package:Thing, which failed to load"):
        attngap.mechanism("missing", 2, 4)
    with pytest.raises(AttngapError, match=r"Mechanism 'wrong' comes from math:sqrt, which is not a Mechanism"):
        attngap.mechanism("wrong", 2, 4)


def test_a_plugin_cannot_take_over_a_built_in_name(installed):
    installed(elu=f"{__name__}:Doubled")
    assert len(attngap.catalogue()) == len(NAMES)
    assert type(attngap.mechanism("elu", 2, 4)) is Elu


def test_state_is_bounded_except_for_softmax():
    for name in NAMES:
        m = attngap.mechanism(name, 2, 4)
        grows = m.state_floats(10**6) > m.state_floats(10**5)
        assert grows is (name == "softmax")
        assert m.state_rank(0) == 1
        assert m.state_rank(10**6) <= 10**6 + 1


def test_same_seed_same_mechanism():
    first, second = (attngap.mechanism("favor", 2, 4) for _ in range(2))
    assert torch.equal(first.feature_map.projection, second.feature_map.projection)
