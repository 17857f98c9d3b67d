"""A tiny trained-looking world: a model, a tokenizer of single characters, and a plan."""

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attngap.models.plan import ModelFacts, Plan, Replacement, architecture, fingerprint
from attngap.models.shapes import layer_shapes
from tests.zoo import tiny, tokenizer

TEXT = "the cat sat on the mat, and the dog sat on the log. who sat where? " * 120


def plan(model: PreTrainedModel, keep=((0, 1), (1, 0)), **replacement) -> Plan:
    shapes = layer_shapes(model)
    facts = ModelFacts(
        name="tiny",
        architecture=architecture(model),
        fingerprint=fingerprint(model),
        layers=len(shapes),
        heads=shapes[0].heads,
        kv_heads=shapes[0].kv_heads,
    )
    near = Replacement(window=8, sinks=2, **replacement)
    return Plan(model=facts, keep=keep, replacement=near, granularity="head")


def world(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Plan]:
    model = tiny(name)
    return model, tokenizer(), plan(model)
