import hashlib
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError
from tests.conversion.small import TEXT, plan
from tests.zoo import SHARED, tiny, tokenizer

runner = CliRunner()
QUICK = ["--context", "64", "--tokens", "256", "--steps", "2", "--joint", "1", "--rounds", "0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base model, a text and a plan on disk, and the model converted from them."""
    folder = tmp_path_factory.mktemp("cli")
    model = tiny()
    model.save_pretrained(folder / "base")
    words = tokenizer()
    words.eos_token = words.pad_token  # lm-evaluation-harness starts texts with it
    words.save_pretrained(folder / "base")
    (folder / "text.txt").write_text(TEXT)
    made = plan(model)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": str(folder / "base")})})
    made.save(folder / "plan.json")
    found = run(folder, "linearize", folder / "base", "--plan", folder / "plan.json", "-o", folder / "fast", "--json")
    (folder / "receipt.txt").write_text(found.stdout)
    return folder


def run(folder, verb, *arguments):
    extra = ["--text", str(folder / "text.txt"), *QUICK] if verb == "linearize" else []
    return runner.invoke(app, [verb, *map(str, arguments), *extra])


def test_json_is_the_receipt_and_the_folder_is_whole(place):
    printed = json.loads((place / "receipt.txt").read_text())
    assert printed == json.loads((place / "fast" / "receipt.json").read_text())
    names = {path.name for path in (place / "fast").iterdir()}
    assert {"adapter.safetensors", "attngap.json", "config.json", "README.md", "receipt.json"} <= names
    assert ".attngap-work" not in names
    card = (place / "fast" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: ")  # a folder on this disk is no base model that a hub could show
    assert "## Limits" in card


def test_generate_continues_a_prompt(place):
    found = run(place, "generate", place / "fast", "the cat", "--tokens", "5", "--json")
    assert set(json.loads(found.stdout)) == {"prompt", "text", "cache_bytes"}
    streamed = run(place, "generate", place / "fast", "the cat", "--tokens", "5")
    assert streamed.exit_code == 0
    assert streamed.stdout.replace(" ", "").startswith("thecat")


def test_generate_can_read_the_prompt_exactly_where_there_is_something_to_make_small(place):
    found = run(place, "generate", place / "fast", "the cat", "--tokens", "5", "--exact-prompt", "--json")
    usual = run(place, "generate", place / "fast", "the cat", "--tokens", "5", "--json")
    assert json.loads(found.stdout)["text"] == json.loads(usual.stdout)["text"]  # all of so short a prompt is near
    held = run(place, "generate", place / "fast", "the cat " * 30, "--tokens", "3", "--exact-prompt", "--hold", "0.2")
    assert held.exit_code == 0
    for share, message in (("0.5", "Give --exact-prompt too"), ("1.5", "from 0 to below 1, got 1.5")):
        exact = ["--exact-prompt"] * (share != "0.5")
        wrong = run(place, "generate", place / "fast", "the cat", "--hold", share, *exact)
        assert message in str(wrong.exception)
    refused = run(place, "generate", place / "base", "the cat", "--exact-prompt")
    assert "A prompt is read exactly by a converted decoder with a window, got" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--diagnosis", "d", "--plan", "plan.json"], "--plan and --diagnosis both say which heads to keep"),
        (["--diagnosis", "d", "--max-ppl-ratio", "1.1"], "--diagnosis and --max-ppl-ratio both say which heads"),
        (["--window", "-1"], "window must be at least 0, got -1"),
        (["--keep", "0.1", "--plan", "plan.json"], "--plan and --keep both say which heads to keep"),
        (["--keep", "0.1", "--max-ppl-ratio", "1.1"], "--keep and --max-ppl-ratio both say how many heads to keep"),
        (["--keep", "2"], "keep takes a share from 0 to 1, got 2"),
        (["--keep", "0.5", "--granularity", "layer"], "granularity must be 'group' or 'head', got 'layer'"),
        (["--plan", "nowhere.json"], "Cannot read the plan 'nowhere.json'"),
    ],
)
def test_wrong_choices_are_refused(place, arguments, message):
    found = run(place, "linearize", place / "base", "-o", place / "new", *arguments)
    assert isinstance(found.exception, AttngapError)
    assert message in str(found.exception)
    assert not (place / "new").exists()


def test_whole_groups_are_kept(place, tmp_path):
    found = run(place, "linearize", place / "base", "--keep", "0.5", "-o", tmp_path / "new", "--json")
    receipt = json.loads(found.stdout)
    size = receipt["heads"] // receipt["groups"]
    assert size > 1
    kept = {(layer, head // size) for layer, head in receipt["keep"]}
    assert len(receipt["keep"]) == size * len(kept) == receipt["heads"] // 2
    assert receipt["kept_groups"] == len(kept)


def test_folders_of_others_are_left_alone(place, tmp_path):
    again = run(place, "linearize", place / "base", "--keep", "0.1", "-o", place / "fast")
    assert "already holds a converted model" in str(again.exception)
    (tmp_path / "letter.txt").write_text("dear")
    other = run(place, "linearize", place / "base", "--keep", "0.1", "-o", tmp_path)
    assert "is not empty and not a converted model" in str(other.exception)


@pytest.mark.parametrize("verb", ["eval"])
def test_a_folder_without_a_converted_model_is_refused(place, verb, tmp_path):
    found = run(place, verb, tmp_path)
    assert "No converted model in" in str(found.exception)
    assert "attngap linearize MODEL -o" in str(found.exception)


def preferred(folder, question, choices):
    """The choice that plain transformers finds likelier after the question."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    words = AutoTokenizer.from_pretrained(folder)
    start = words(question, return_tensors="pt").input_ids
    scores = []
    for choice in choices:
        rest = words(choice, return_tensors="pt").input_ids
        with torch.no_grad():
            found = model(torch.cat([start, rest], 1)).logits.log_softmax(-1)[0, start.shape[1] - 1 : -1]
        scores.append(found.gather(1, rest.T).sum().item())
    return scores.index(max(scores))


def test_eval_adds_what_it_measures_and_leaves_what_stood_there(place, tmp_path):
    shutil.copytree(place / "fast", tmp_path / "fast")
    before = json.loads((tmp_path / "fast" / "receipt.json").read_text())
    sizes = ["--passages", "1", "--trials", "1", "--contexts", "48,64", "--prefill-up-to", "48"]
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    for text in (place / "text.txt", other):
        found = run(place, "eval", tmp_path / "fast", "--text", text, *sizes, "--json")
        assert found.exit_code == 0, found.exception
    after = json.loads((tmp_path / "fast" / "receipt.json").read_text())
    assert json.loads(found.stdout) == after
    assert after | {"entries": []} == before
    first, second = after["entries"]
    assert [entry["text"] for entry in (first, second)] == ["text.txt", "other.txt"]
    assert second["text_sha256"] == hashlib.sha256(TEXT[::-1].encode()).hexdigest() != first["text_sha256"]
    assert first["time"] <= second["time"] == second["provenance"]["time"]
    assert second["provenance"]["far_part"] == before["provenance"]["far_part"]
    assert [speed["context"] for speed in first["speed"]["converted"]] == [48, 64]
    assert [speed["prefill"] is None for speed in first["speed"]["original"]] == [False, True]
    assert first["quality"]["original"]["perplexity_ratio"] == 1.0
    assert first["quality"]["converted"]["divergence"] != second["quality"]["converted"]["divergence"]
    card = (tmp_path / "fast" / "README.md").read_text()
    assert card.count("### Measured 2") == 2
    assert f"{second['quality']['converted']['divergence']:.4f}" in card


TASK = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["cat", "dog"]
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
def test_a_task_of_the_harness_runs_offline(place, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'attngap[eval]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "questions.jsonl"
    questions = ["the", "who sat", "on the mat, the", "a log and a"]
    answers = [preferred(place / "base", question, [" cat", " dog"]) for question in questions]
    rows = [{"question": question, "answer": answer} for question, answer in zip(questions, answers, strict=True)]
    rows.append({"question": questions[0], "answer": 1 - answers[0]})  # one of five that both models must get wrong
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    found = run(place, "eval", place / "fast", "--lm-eval", tmp_path / "tiny.yaml", "--json")
    assert found.exit_code == 0, found.exception
    scores = json.loads(found.stdout)
    # The questions lie inside sinks and window, where the converted model is the original.
    assert scores["original"]["acc"] == scores["converted"]["acc"] == pytest.approx(0.8)


def test_the_harness_is_asked_for_by_name_when_missing(place, monkeypatch):
    monkeypatch.setattr("attngap.cli.eval.importlib.util.find_spec", lambda name: None)
    found = run(place, "eval", place / "fast", "--lm-eval", "task.yaml")
    assert "--lm-eval needs the extra 'eval', which is not installed. Run: " in str(found.exception)


def test_without_any_choice_a_tenth_of_the_heads_is_kept_by_the_common_defaults(place, tmp_path):
    found = run(place, "linearize", place / "base", "-o", tmp_path / "new", "--no-measure", "--json")
    receipt = json.loads(found.stdout)
    assert [receipt["options"][name] for name in ("keep", "window", "sinks", "granularity")] == [0.1, 512, 4, "group"]
    assert receipt["quality"] == {}
    assert "Not measured yet" in (tmp_path / "new" / "README.md").read_text()


def test_what_was_not_measured_is_measured_later(place, tmp_path):
    run(place, "linearize", place / "base", "--keep", "0.5", "-o", tmp_path / "new", "--no-measure")
    (tmp_path / "new" / "receipt.json").unlink()  # as if saved by hand
    options = ["--passages", "1", "--trials", "1", "--contexts", "96", "--text", place / "text.txt"]
    found = run(place, "eval", tmp_path / "new", *options, "--json")
    assert found.exit_code == 0, found.exception
    receipt = json.loads((tmp_path / "new" / "receipt.json").read_text())
    assert json.loads(found.stdout) == receipt
    assert receipt["entries"] == []
    assert receipt["notes"][0].startswith("measured later on text.txt (sha256 ")
    assert receipt["quality"]["original"]["perplexity_ratio"] == 1
    assert receipt["quality"]["converted"]["divergence"] > 0
    assert [point["context"] for point in receipt["speed"]["converted"]] == [96]
    assert (receipt["heads"], receipt["kept"]) == (8, 4)


def test_a_diagnosis_chooses_the_heads_that_are_kept(place, tmp_path):
    near = ["--window", "8", "--sinks", "2"]
    small = ["--context", "64", "--passages", "2", "--ranks", "2,4", *near, "--text", str(place / "text.txt")]
    runner.invoke(app, ["diagnose", str(place / "base"), "-o", str(tmp_path / "found"), *small])
    made = runner.invoke(
        app, ["plan", str(tmp_path / "found"), "--keep", "0.5", "-o", str(tmp_path / "p.json"), "--json"]
    )
    choice = ["--diagnosis", tmp_path / "found", "--keep", "0.5"]
    found = run(place, "linearize", place / "base", *choice, "-o", tmp_path / "new", "--no-measure", "--json")
    receipt = json.loads(found.stdout)
    assert receipt["keep"] == json.loads(made.stdout)["keep"]
    assert receipt["options"]["window"] == 8  # the diagnosis's own


@pytest.mark.parametrize("verb", ["diagnose", "linearize"])
def test_a_folder_of_the_user_is_left_as_it_is(place, tmp_path, monkeypatch, verb):
    """With -o . nothing of the user's is touched: neither a folder called work, nor README.md or config.json."""
    (tmp_path / "work").mkdir()
    for name in ("work/thesis.tex", "README.md", "config.json"):
        (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    found = runner.invoke(app, [verb, str(place / "base"), "-o", ".", "--text", str(place / "text.txt")])
    assert isinstance(found.exception, AttngapError)
    assert "is not empty and not a" in str(found.exception)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "README.md", "config.json", "work", "work/thesis.tex",
    ]  # fmt: skip
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"mine"}


def test_a_file_is_no_folder(place):
    found = run(place, "linearize", place / "base", "-o", place / "text.txt")
    assert "is a file. Choose a folder" in str(found.exception)


def test_a_base_given_by_a_relative_path_is_found_from_anywhere(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    run(place, "linearize", "base", "--keep", "0.5", "-o", "relative", "--no-measure")
    monkeypatch.chdir(tmp_path)
    found = run(place, "generate", place / "relative", "the cat", "--tokens", "2", "--json")
    assert found.exit_code == 0, found.exception


def test_an_encoder_is_not_shown_what_only_a_decoder_has(place, tmp_path):
    """No perplexity, no divergence of predictions, and nothing to generate."""
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SHARED, pad_token_id=0)).save_pretrained(tmp_path / "bert")
    tokenizer(specials=True).save_pretrained(tmp_path / "bert")
    done = run(place, "linearize", tmp_path / "bert", "--keep", "0.5", "-o", tmp_path / "new")
    assert done.exit_code == 0, done.exception
    assert "error of states" in done.output
    assert not any(word in done.output for word in ("generate", "perplexity", "KL"))
    card = (tmp_path / "new" / "README.md").read_text()
    assert "model = AutoModel.from_pretrained" in card
    assert "| | error of states |" in card
    page = runner.invoke(app, ["report", str(tmp_path / "new"), "-o", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.exception
    text = (tmp_path / "page.html").read_text()
    assert "error of states" in text
    assert "KL, nats" not in text
