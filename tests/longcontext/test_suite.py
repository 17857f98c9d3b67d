"""The suite's tasks are solved here by other means than the models': by reading the context."""

import collections
import json
import random
import re

import pytest
import torch

from attngap.errors import AttngapError
from attngap.heads.passages import language_reference
from attngap.longcontext.harness import export_tasks
from attngap.longcontext.scoring import answer, answer_blind, difference, wilson
from attngap.longcontext.suite import make, run_suite
from attngap.longcontext.tasks import COPIED, TASKS, entries, task
from attngap.longcontext.writing import Writer
from tests import zoo

WORDS = zoo.tokenizer()
TEXT = "\n\n".join(language_reference())
LENGTH = 1500  # characters, as this tokenizer counts


def example(name: str, seed: str = "0"):
    return make(task(name), WORDS, TEXT, LENGTH, seed)


def read(tokens) -> str:
    """The characters; this tokenizer knows no white space."""
    return "".join(WORDS.convert_ids_to_tokens([int(token) for token in tokens])).replace("[UNK]", " ")


@pytest.fixture(params=[each.name for each in TASKS])
def name(request):
    return request.param


def test_context_question_and_answer_fit_the_length_and_repeat_by_seed(name):
    one, again, other = example(name), example(name), example(name, "1")
    longest = max(len(q.ask) + len(q.answer) for q in one.questions)
    assert LENGTH - 120 <= one.context.shape[1] + longest <= LENGTH
    assert torch.equal(one.context, again.context)
    assert one.questions == again.questions
    assert one.questions != other.questions


def test_answers_stand_in_the_context(name):
    found = example(name)
    context = found.context[0].tolist()
    for question in found.questions:
        pieces = [list(question.answer)]
        if name == "values":  # three numbers, apart in the context
            comma = WORDS(",").input_ids[0]
            text, pieces = list(question.answer), [[]]
            for token in text:
                if token == comma:
                    pieces.append([])
                elif token != WORDS(" ").input_ids[0]:
                    pieces[-1].append(token)
        for piece in pieces:
            assert any(context[i : i + len(piece)] == piece for i in range(len(context)))


def test_tracking_leads_to_the_number_that_is_asked_for():
    found = example("tracking")
    text = read(found.context[0])
    numbers = dict(re.findall(r"the number (\w+) is (\d+)\.", text))
    links = dict(re.findall(r"the number (\w+) is equal to the number (\w+)\.", text))
    for question in found.questions:
        asked = read(question.ask)
        (variable,) = re.findall(r"what is the number (\w+)\?", asked)
        while variable in links:
            variable = links[variable]
        assert numbers[variable] == read(question.answer)


def test_the_frequent_word_is_the_most_frequent():
    found = example("frequent")
    words = read(found.context[0]).split()
    ((most, _),) = collections.Counter(words).most_common(1)
    assert read(found.questions[0].answer).strip() == most


def test_lookup_keys_are_distinct_so_that_only_one_value_is_right():
    text = read(example("lookup").context[0])
    keys = re.findall(r"(\w+): \d+", text)
    assert len(keys) == len(set(keys)) > 20


def test_repetition_lies_half_the_length_back():
    found = example("repetition")
    tokens = [*found.context[0].tolist(), *found.questions[0].ask, *found.questions[0].answer]
    half = len(tokens) // 2
    assert tokens[:half] == tokens[half:]
    assert len(found.questions[0].answer) == COPIED


def test_entries_are_a_dictionary():
    assert len(entries()) > 300
    assert dict(entries())["acos"].startswith("Return the arc cosine")


def test_scores_equal_one_pass_without_a_cache():
    model = zoo.tiny("llama")
    writer = Writer(WORDS, TEXT, 250, random.Random(0))
    found = writer.weave([(0.5, " a1b2c3 ")], [writer.question("what?", "a1b2c3"), writer.question("and?", "b2")])
    with torch.no_grad():
        for question, share in zip(found.questions, answer(model, found), strict=True):
            whole = torch.cat((found.context, torch.tensor([[*question.ask, *question.answer]])), 1)
            guess = model(whole, use_cache=False).logits[0, -len(question.answer) - 1 : -1].argmax(-1)
            assert share == (guess == whole[0, -len(question.answer) :]).float().mean()
    assert len(answer_blind(model, found)) == 2


def test_intervals_cover_what_they_should():
    """Wilson's interval covers the true share of coins in about 95 of 100 series."""
    generator = random.Random(0)
    covered = 0
    for _ in range(2000):
        hits = sum(generator.random() < 0.8 for _ in range(20)) / 20
        interval = wilson(hits, 20)
        covered += interval.low <= 0.8 <= interval.high
    assert 0.92 < covered / 2000 < 0.98
    assert wilson(1.0, 8).low < 0.7  # eight of eight is no certainty
    assert difference(1.0, 1.0, 8).low < 0 < difference(1.0, 1.0, 8).high
    assert difference(0.1, 0.9, 20).high < 0


def test_a_stopped_suite_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model = zoo.tiny("llama")
    options = {"lengths": [250], "tasks": ["needle", "frequent"], "examples": 2, "quiet": True}
    whole = run_suite({"original": model, "same": model}, WORDS, TEXT, **options)
    record = tmp_path / "suite.jsonl"
    run_suite({"original": model, "same": model}, WORDS, TEXT, **options | {"tasks": ["needle"]}, record=record)
    before = record.read_text()
    record.write_text(before + '{"key": "frequent/250/0", "ans')  # killed while it wrote
    resumed = run_suite({"original": model, "same": model}, WORDS, TEXT, **options, record=record)
    assert resumed == whole
    assert {score.verdict for score in whole.scores if score.model == "same"} == {"level within noise"}
    assert record.read_text().startswith(before)


def test_mistakes_are_said_in_one_line(tmp_path):
    model = zoo.tiny("llama")
    with pytest.raises(AttngapError, match=r"A length of 1024 is beyond this model's 512 positions\. Give a shorter"):
        run_suite({"original": model}, WORDS, TEXT, lengths=[1024])
    with pytest.raises(AttngapError, match=r"No long-context task 'nedle'\. Did you mean 'needle'\?"):
        run_suite({"original": model}, WORDS, TEXT, lengths=[250], tasks=["nedle"])
    with pytest.raises(AttngapError, match="needs a causal language model, got BertModel"):
        run_suite({"original": zoo.tiny("bert")}, WORDS, TEXT, lengths=[128])
    with pytest.raises(AttngapError, match="has no room for this task"):
        make(task("needle"), WORDS, TEXT, 40, "0")
    (tmp_path / "other.jsonl").write_text('{"models": ["another"]}\n')
    with pytest.raises(AttngapError, match="holds a suite of other models"):
        run_suite({"a": model}, WORDS, TEXT, lengths=[250], record=tmp_path / "other.jsonl")


def test_tasks_for_the_harness_say_context_and_answer(tmp_path):
    (path,) = export_tasks(tmp_path, WORDS, TEXT, length=400, tasks=["needle"], examples=3)
    assert path.name == "attngap_needle_400.yaml"
    rows = [json.loads(line) for line in (tmp_path / "attngap_needle_400.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(re.fullmatch(r"(\[UNK\]| |\d)+", row["answer"]) for row in rows)
