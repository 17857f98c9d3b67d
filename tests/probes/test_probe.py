import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attngap
from attngap.errors import AttngapError
from attngap.mechanisms.variants.elu import Elu
from attngap.probes.tasks.catalogue import task
from attngap.probes.zero_shot import ordinary_tokens, zero_shot

QUICK = {"steps": 4, "batch": 4, "evaluate_every": 2, "validation": 4, "test": 8}
SMALL = {"width": 16, "heads": 2, "layers": 2}


def test_by_name(tmp_path):
    db = tmp_path / "runs.db"
    first = attngap.probe("copy", "elu", seeds=2, learning_rates=[1e-3, 1e-2], model=SMALL, train=QUICK, db=db)
    again = attngap.probe("copy", "elu", seeds=2, learning_rates=[1e-3, 1e-2], model=SMALL, train=QUICK, db=db)
    assert first.records == again.records
    assert len(first.records) == 4
    assert first.summary.learning_rates == (1e-3, 1e-2)
    assert first.metric == "accuracy"
    assert first.closed == pytest.approx((first.score - first.chance) / (first.best - first.chance))
    assert first.records[0].provenance["versions"]["torch"] == torch.__version__


class Doubled(Elu):
    name = "doubled"


def test_an_object_or_a_function_of_one_s_own_trains_like_the_name():
    named = attngap.probe("copy", "elu", model=SMALL, train=QUICK)
    by_object = attngap.probe("copy", Doubled(2, 8), model=SMALL, train=QUICK)
    by_function = attngap.probe("copy", Doubled, model=SMALL, train=QUICK)
    curves = [result.records[0].result["curve"] for result in (named, by_object, by_function)]
    assert [list(map(tuple, curve)) for curve in curves] == [list(map(tuple, curves[0]))] * 3
    assert by_object.mechanism == by_function.mechanism == "doubled"


@pytest.mark.parametrize("mechanism", ["elu", Elu])
def test_threads_are_those_asked_for_and_are_given_back(mechanism):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert attngap.probe("copy", mechanism, model=SMALL, train=QUICK).records[0].provenance["threads"] == 1
        wide = attngap.probe("copy", mechanism, model=SMALL, train=QUICK, threads=2)
        assert wide.records[0].provenance["threads"] == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_prediction_is_for_memories_of_fixed_size():
    predictions = {
        name: attngap.probe("copy", name, model=SMALL, train=QUICK).summary.predicted for name in ("elu", "softmax")
    }
    assert 0 < predictions["elu"] < 1
    assert predictions["softmax"] is None


def test_a_task_object_brings_its_options():
    result = attngap.probe(task("copy", items=3, symbols=5), "elu", model=SMALL, train=QUICK)
    assert result.chance == 1 / 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cppy", "elu"), r"No task 'cppy'\. Did you mean 'copy'\?"),
        (("copy", "eluu"), r"No mechanism 'eluu'\. Did you mean 'elu'\?"),
        (
            ("copy", 3),
            "mechanism must be a name, a Mechanism, a function that makes one, or a Hugging Face model; got 3",
        ),
        (("copy", lambda h, d, v: 3), "must make a Mechanism, it made 3"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(AttngapError, match=message):
        attngap.probe(*arguments, model=SMALL, train=QUICK)


def test_objects_cannot_be_stored(tmp_path):
    with pytest.raises(AttngapError, match="db, ray and state need a mechanism by name"):
        attngap.probe("copy", Elu(2, 8), model=SMALL, train=QUICK, db=tmp_path / "runs.db")


def test_no_seeds():
    with pytest.raises(AttngapError, match="at least one seed and one learning rate"):
        attngap.probe("copy", "elu", seeds=[])


class Reader(torch.nn.Module):
    """A language model that finds the last time the current token came and says what followed: an induction head."""

    device = torch.device("cpu")

    def __init__(self, size=500):
        super().__init__()
        self.embedding = torch.nn.Embedding(size, 1)
        self.config = type("Config", (), {"name_or_path": "reader"})()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, self.embedding.num_embeddings)
        for row, tokens in enumerate(input_ids.tolist()):
            follows = {}
            for i, token in enumerate(tokens):
                if token in follows:
                    logits[row, i, follows[token]] = 1.0
                if i + 1 < len(tokens):
                    follows.setdefault(token, tokens[i + 1])
        return type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("name", ["mqar", "induction"])
def test_zero_shot_sees_an_induction_head(name):
    small = task(name, vocabulary=64)
    result = attngap.probe(small, Reader())
    assert result.score == 1.0
    assert result.mechanism == "reader"
    assert zero_shot(Reader(), small, sequences=5).open == 1.0


def test_zero_shot_of_an_untrained_model_is_chance():
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    small = task("mqar", vocabulary=64)
    found = zero_shot(model, small, sequences=64)
    assert found.score == pytest.approx(1 / 64, abs=0.05)
    assert zero_shot(model, small, sequences=64) == found


def test_zero_shot_uses_ordinary_tokens_only():
    class Tokenizer:
        all_special_ids = (0, 7)
        bos_token_id = 7

        def __len__(self):
            return 200

    ids = ordinary_tokens(Reader(500), Tokenizer()).tolist()
    assert ids == [i for i in range(200) if i not in (0, 7)]


def test_zero_shot_refusals():
    with pytest.raises(AttngapError, match=r"needle cannot be put to a language model as tokens\. Allowed: mqar, copy"):
        attngap.probe("needle", Reader())
    with pytest.raises(AttngapError, match="mqar needs 512 different tokens, the model has 100 ordinary ones"):
        attngap.probe("mqar", Reader(100))
