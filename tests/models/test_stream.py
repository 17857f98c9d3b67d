"""Conversations token by token: what `generate` would write, in a cache that goes on from turn to turn."""

import pytest
import torch

from attngap.errors import AttngapError
from attngap.models.cache import cache_bytes
from attngap.models.stream import Conversation, prompt_ids
from attngap.models.swap import swap
from tests import zoo
from tests.zoo import mechanisms, tiny


def said(text):
    return [{"role": "user", "content": text}]


def models():
    original = tiny()
    parts = {layer: (mechanism, [0]) for layer, mechanism in mechanisms(original, window=4, sinks=1).items()}
    return {"original": original, "converted": swap(original, parts)}


@pytest.mark.parametrize("name", ["original", "converted"])
def test_a_reply_is_what_generate_writes(name):
    model, words = models()[name], zoo.tokenizer()
    ids = torch.tensor([prompt_ids(words, said("the cat sat on the mat"))])
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist()
    steps = list(Conversation(model, words).reply(said("the cat sat on the mat"), limit=9))
    assert "".join(step.text for step in steps) == words.decode(expected, skip_special_tokens=True)
    assert [step.tokens for step in steps] == [ids.shape[1] + place for place in range(len(steps))]


def test_the_next_turn_reads_only_what_is_new_and_answers_as_a_fresh_start_would(monkeypatch):
    model, words = models()["converted"], zoo.tokenizer()
    talk, fed = Conversation(model, words), []
    feed = talk._feed
    monkeypatch.setattr(talk, "_feed", lambda ids: (fed.append(list(ids)), feed(ids))[1])
    first = said("the cat")
    talk.read = []
    reply = "".join(step.text for step in talk.reply(first, limit=4))
    ids = prompt_ids(words, said("the cat" + "".join([reply, " sat"])))
    going_on = ids[: len(talk.read)] == talk.read
    second = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": " sat"}]
    fed.clear()
    again = [step.text for step in talk.reply(second, limit=4)]
    assert (len(fed[0]) < len(ids)) == going_on
    assert again == [step.text for step in Conversation(model, words).reply(second, limit=4)]


def test_the_cache_of_a_conversation_is_measured(monkeypatch):
    words = zoo.tokenizer()
    sizes = {}
    for name, model in models().items():
        talk = Conversation(model, words)
        steps = list(talk.reply(said("the cat sat on the mat " * 20), limit=2))
        assert steps[-1].cache_bytes == cache_bytes(talk.cache)
        sizes[name] = steps[-1].cache_bytes
    assert sizes["converted"] < sizes["original"]


def test_mistakes_are_one_line():
    with pytest.raises(AttngapError, match="An encoder writes no text"):
        Conversation(zoo.tiny("bert"), zoo.tokenizer())
    with pytest.raises(AttngapError, match="The prompt is empty"):
        prompt_ids(zoo.tokenizer(), said(""))
