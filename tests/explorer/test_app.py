"""The explorer's answers, without a browser."""

import base64
import json
import subprocess
import sys
import time

import made_up
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

from attngap.explorer import law, weights
from attngap.explorer.app import create
from attngap.explorer.sentence import Sentences
from attngap.explorer.shelf import Shelf
from attngap.mechanisms.catalogue import catalogue, mechanism
from attngap.models.swap import swap
from attngap.theory import separation

HERE = {"log10_n": 6, "d": 514, "needle": 0.7, "a0": 0.05, "b": 0.5, "scale": 1, "m": 40, "degree": 4}
DRAGGED = 0.5  # seconds of a processor: 0.05 of a quick one, 0.14 of a slow one, and far from what a person waits for


class Letters:
    """A tokenizer with one token a character."""

    def __call__(self, text, return_tensors=None):
        ids = [ord(letter) % 97 for letter in text]
        return BatchEncoding({"input_ids": torch.tensor([ids]) if return_tensors else ids})

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f"<{one}>" for one in ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


@pytest.fixture
def client(tmp_path, model):
    made_up.diagnosis(tmp_path / "run" / "diagnosis")
    made_up.runs(tmp_path / "runs.sqlite")
    app = create([tmp_path], Sentences(model, Letters(), "letters"))
    return TestClient(app, base_url="http://127.0.0.1")


def pixels(answer):
    roots = np.frombuffer(base64.b64decode(answer["roots"]), np.uint8)
    return (roots.reshape(answer["side"], answer["side"]) / 255.0) ** 2 * answer["top"]


def test_the_law_is_the_theorys(client):
    answer = client.get("/api/law", params=HERE).json()
    n = 999_936
    assert answer["n"] == n
    assert n % 512 == 0
    for name, kernel in (("softmax", "softmax"), ("linear", "linear"), ("polynomial", ("polynomial", 4.0))):
        expected = separation.law(kernel, n=n, d=514, a0=0.05, a1=0.7, b=0.5, m=40)
        assert answer["success"][name] == expected.success
        assert answer["mass"][name] == expected.mass.needle_row
    assert answer["concentrates_from"] == pytest.approx((5**0.5 - 1) / 2)


def test_the_law_answers_while_a_slider_moves(client):
    client.get("/api/law", params=HERE)
    spent = []
    for needle in (0.3, 0.5, 0.9, 1.1, 1.3):
        start = time.process_time()
        assert client.get("/api/law", params=HERE | {"needle": needle, "log10_n": 12}).status_code == 200
        spent.append(time.process_time() - start)
    assert min(spent) < DRAGGED


def test_the_curve_is_drawn_while_a_slider_moves():
    """Of processor time, as a user has it: under pytest every shape is checked, which takes four times as long."""
    code = f"""
import time
from attngap.explorer import law
law.curve(law.Place(**{HERE}))
spent = []
for scale in (1.1, 1.2, 1.3, 1.4, 1.5):
    start = time.process_time()
    law.curve(law.Place(**({HERE} | {{"scale": scale}})))
    spent.append(time.process_time() - start)
print(min(spent))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) < DRAGGED, done.stderr


def test_the_curve_meets_the_number_at_its_needle(client):
    curve = client.get("/api/law/curve", params=HERE).json()
    point = next(point for point in curve if point["kernel"] == "softmax" and point["needle"] == law.NEEDLES[15])
    here = client.get("/api/law", params=HERE | {"needle": law.NEEDLES[15]}).json()
    assert point["success"] == here["success"]["softmax"]


@pytest.mark.parametrize("name", catalogue())
def test_weights_of_every_mechanism_beside_softmax(client, name):
    asked = {"name": name, "tokens": 24, "sharpness": 2, "data": "needle", "seed": 3}
    answer = client.get("/api/weights", params=asked).json()
    q, k = weights.queries_and_keys(24, 2.0, "needle", 3)
    exact = torch.softmax((q @ k.mT / 4).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf), -1)[0, 0].numpy()
    assert np.abs(np.sqrt(pixels(answer["softmax"])) - np.sqrt(exact)).max() < 0.01
    assert (answer["distance"] < 1e-12) == (name == "softmax")


def test_mistakes_are_one_line(client):
    asked = {"name": "gal", "tokens": 24, "sharpness": 2, "data": "needle", "seed": 3}
    answer = client.get("/api/weights", params=asked)
    assert answer.status_code == 422
    assert answer.json() == {"error": "No mechanism 'gal'. Did you mean 'gla'? List them: attngap mechanisms"}
    assert client.get("/api/weights", params=asked | {"name": "elu", "tokens": 5000}).json() == {
        "error": "tokens must be 2 to 128, got 5000"
    }
    answer = client.get("/api/law", params=HERE | {"needle": 9})
    assert (answer.status_code, answer.json()) == (422, {"error": "needle: Input should be less than or equal to 1.5"})
    for odd in ({"seed": 2**70}, {"sharpness": "nan"}, {"sharpness": "9" * 400}):
        assert (
            client.get("/api/weights", params=asked | {"name": "elu"} | odd)
            .json()["error"]
            .startswith("sharpness must")
        )
    said = client.post("/api/chat", json={"original": [{"role": "user"}]})
    assert said.json() == {"error": "A message has a role and a content"}
    assert client.post("/api/chat", content=b"\xff\xfe").json()["error"].startswith("the request: ")
    assert client.get("/api/sentence", params={"text": "x"}).json()["error"].startswith("The sentence has fewer than 2")
    assert client.get("/api/sentence/9/0", params={"text": "abc"}).json() == {
        "error": "No head 9.0: layers are 0-1, heads 0-3"
    }
    assert client.get("/report/99").json() == {"error": "No result number 99. Go back to the list"}


def test_heads_on_a_sentence_are_the_models_own(client, model):
    text = "attention is all"
    answer = client.get("/api/sentence", params={"text": text}).json()
    assert len(answer["heads"]) == 8
    assert answer["tokens"][0] == "<0>"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(Letters()(text, "pt")["input_ids"], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for row in answer["heads"]:
        exact = expected[row["layer"]][0, row["head"]]
        assert row["first"] == pytest.approx(exact[1:, 0].mean().item(), abs=5e-4)
        assert row["top"] == pytest.approx(exact[1:].amax(-1).mean().item(), abs=5e-4)
    picture = client.get("/api/sentence/1/2", params={"text": text}).json()["models"]["original"]
    assert np.abs(np.sqrt(pixels(picture)) - expected[1][0, 2].sqrt().numpy()).max() < 0.01


def test_only_the_last_sentences_are_remembered(model):
    sentences = Sentences(model, Letters(), "letters")
    for place in range(9):
        sentences.heads(f"sentence {place}")
    assert len(sentences._seen) == 2


def test_without_a_model_the_sentence_says_how_to_load_one(tmp_path):
    client = TestClient(create([tmp_path]), base_url="http://localhost")
    assert "attngap serve --model smollm2" in client.get("/api/sentence", params={"text": "ab"}).json()["error"]
    assert client.get("/").status_code == 200


def test_results_and_sweeps_are_listed_and_open(client, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "receipt.json").write_text('{"schema": "attngap.receipt/1", "mod')
    (tmp_path / "broken" / "other.json").write_text('{"schema": "attngap.plan/1", "provenance": [], "model": 3}')
    (tmp_path / "broken" / "utf16.json").write_text("{}", encoding="utf-16")
    (tmp_path / "broken" / "other.db").write_bytes(b"not a database")
    damaged = bytearray((tmp_path / "runs.sqlite").read_bytes())
    damaged[4096:] = bytes(len(damaged) - 4096)  # its header stands, its tables do not
    (tmp_path / "broken" / "runs.sqlite").write_bytes(damaged)
    answer = client.get("/api/results").json()
    kinds = {row["kind"]: row for row in answer["results"]}
    assert set(kinds) == {"diagnosis", "plan", "probe runs", "unreadable"}
    faults = [row["model"] for row in answer["results"] if row["kind"] == "unreadable"]
    assert ["is cut off or damaged" in faults[0], "Cannot read" in faults[1]] == [True, True]
    sweep = next(row for row in answer["sweeps"] if row["path"] == str(tmp_path / "runs.sqlite"))
    assert (sweep["sweep"], sweep["done"], sweep["total"]) == ("small", 6, 6)
    page = client.get(f"/report/{kinds['diagnosis']['number']}")
    assert page.status_code == 200
    assert "<h1>tiny</h1>" in page.text


@pytest.mark.parametrize(
    ("open_to", "host", "status"),
    [
        ("127.0.0.1", "http://evil.example", 400),
        ("127.0.0.1", "http://localhost:8777", 200),
        ("127.0.0.1", "http://10.0.0.7", 400),
        ("0.0.0.0", "http://evil.example", 400),
        ("0.0.0.0", "http://10.0.0.7:8777", 200),
        ("0.0.0.0", "http://localhost", 200),
    ],
)
def test_a_page_elsewhere_cannot_make_its_name_point_here(tmp_path, open_to, host, status):
    """DNS rebinding: only our own names and plain addresses, also when other machines are let in."""
    assert TestClient(create([tmp_path], open_to=open_to), base_url=host).get("/").status_code == status


def test_allowing_others_without_binding_to_them_drops_no_check(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from attngap.cli import serve
    from attngap.cli.app import app

    made = []
    monkeypatch.setattr(serve, "_run", lambda app, listening: made.append(app))
    CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", "--allow-remote"], catch_exceptions=False)
    assert TestClient(made[0], base_url="http://evil.example").get("/").status_code == 400


def test_a_text_that_is_cut_says_so(client):
    answer = client.get("/api/sentence", params={"text": "a" * 600}).json()
    assert (len(answer["tokens"]), answer["all_tokens"]) == (512, 600)


@pytest.fixture
def pair(model):
    """A model and its conversion, one head of layer 0 kept."""
    parts = {0: (mechanism("hybrid", 4, 8, kv_heads=2, window=3, sinks=1, scale=8**-0.5), [1])}
    return Sentences(model, Letters(), "letters", swap(model, parts))


def test_a_converted_head_stands_beside_the_original(pair, tmp_path):
    client = TestClient(create([tmp_path], pair), base_url="http://127.0.0.1")
    text = "attention is all"
    answer = client.get("/api/sentence", params={"text": text}).json()
    assert answer["exact"] == 4
    rows = {row["id"]: row for row in answer["heads"]}
    assert [id for id, row in rows.items() if row["replaced"]] == ["0.0", "0.2", "0.3"]
    assert rows["0.1"]["changed"] == pytest.approx(0, abs=1e-6)
    assert rows["0.2"]["changed"] > 0.01
    both = client.get("/api/sentence/0/2", params={"text": text}).json()["models"]
    apart = 0.5 * np.abs(pixels(both["original"]) - pixels(both["converted"])).sum(-1).mean()
    assert apart == pytest.approx(rows["0.2"]["changed"], abs=0.02)


def test_the_choice_is_the_plans_own_point_with_its_interval(model, tmp_path):
    model.config.architectures = ["LlamaForCausalLM"]
    made_up.plan(tmp_path / "other.json", layers=3, heads=4)
    content = made_up.plan(tmp_path / "plan.json", layers=2, heads=4)
    client = TestClient(create([tmp_path], Sentences(model, Letters(), "letters")), base_url="http://127.0.0.1")
    for kept in (0, 3, 8):
        answer = client.get("/api/choice", params={"kept": kept}).json()
        point = next(point for point in content["curve"] if point["kept"] == kept)
        assert answer["share"] == kept / 8
        assert [answer[key] for key in ("perplexity_ratio", "recalled")] == [
            point["perplexity_ratio"],
            point["recalled"],
        ]
        assert f"With softmax on {kept} of 8 heads" in answer["sentence"]
    assert 'id="choice-form"' in client.get("/").text


def test_without_a_plan_that_predicts_there_is_no_choice_to_move(tmp_path):
    made_up.plan(tmp_path / "plan.json", predicts=False)
    client = TestClient(create([tmp_path]), base_url="http://127.0.0.1")
    assert 'id="choice-form"' not in client.get("/").text
    refused = client.get("/api/choice", params={"kept": 1})
    assert refused.status_code == 422
    assert "attngap plan DIR" in refused.json()["error"]


def test_verdicts_of_a_diagnosis_of_the_same_shape_lie_over_the_map(model, tmp_path):
    made_up.diagnosis(tmp_path / "other", layers=3, heads=4)
    assert Shelf([tmp_path]).verdicts(model.config) == {}
    model.config.architectures = ["LlamaForCausalLM"]
    content = made_up.diagnosis(tmp_path / "fits", layers=2, heads=4)
    assert Shelf([tmp_path]).verdicts(model.config) == {head["id"]: head["verdict"] for head in content["heads"]}


def test_both_models_answer_token_by_token(pair, tmp_path):
    client = TestClient(create([tmp_path], pair), base_url="http://127.0.0.1")
    said = [{"role": "user", "content": "attention is all you need" * 16}]
    answer = client.post("/api/chat?tokens=3", json={"original": said, "converted": said})
    steps = [json.loads(line) for line in answer.text.splitlines()]
    assert [step["model"] for step in steps] == ["original", "converted"] * 4
    assert [step.get("done") for step in steps] == [None] * 6 + [True] * 2
    assert steps[0]["tokens"] == 400
    assert steps[5]["cache_bytes"] < steps[4]["cache_bytes"]
    wrong = client.post("/api/chat", json={"nobody": said})
    assert wrong.status_code == 422
    assert "is of one of: original, converted" in wrong.json()["error"]
