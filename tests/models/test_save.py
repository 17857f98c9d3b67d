import copy
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import attngap
from attngap.conversion.evaluate import Measures
from attngap.conversion.linearize import linearize
from attngap.errors import AttngapError
from attngap.models.save import conversion_of, load_converted, save, weights_hash
from tests.conversion.small import TEXT, plan
from tests.zoo import tiny, tokenizer

QUICK = {
    "context": 64,
    "tokens": 256,
    "steps": 2,
    "joint": 1,
    "rounds": 0,
    "measures": Measures(passages=1, trials=0, contexts=(), baselines=False),
}
TOKENS = torch.arange(1, 41)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def converted(base, **options):
    model, words = attngap.load(base)
    made = plan(model)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": str(base)})})
    return model, words, linearize(model, words, made, TEXT, **(QUICK | options))[0]


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def test_adapter_round_trip_to_the_bit(base, tmp_path):
    _, words, model = converted(base)
    attngap.save(model, tmp_path, tokenizer=words)
    for again in (
        load_converted(tmp_path)[0],
        attngap.load(tmp_path)[0],
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert torch.equal(logits(again), logits(model))
    assert AutoTokenizer.from_pretrained(tmp_path)("abc").input_ids == words("abc").input_ids
    assert (tmp_path / "adapter.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    again, before = conversion_of(attngap.load(tmp_path)[0]), conversion_of(model)
    assert (again.layers, again.plan, again.base) == (before.layers, before.plan, before.base)


def test_a_folder_of_the_schema_before_still_loads(base, tmp_path):
    _, words, model = converted(base)
    attngap.save(model, tmp_path, tokenizer=words)
    path = tmp_path / "attngap.json"
    content = json.loads(path.read_text()) | {"schema": "attngap.conversion/1"}
    path.write_text(json.dumps({name: x for name, x in content.items() if name not in ("adapter", "seal")}))
    assert torch.equal(logits(attngap.load(tmp_path)[0]), logits(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["layers"][0]["options"].pop("window"), r"lacks 'window' of layer 0"),
        (lambda r: r["layers"][0]["options"].update(relative="no"), r"relative must be bool, got 'no'"),
        (lambda r: r["layers"][0]["options"].update(window="5"), r"window must be int, got '5'"),
        (lambda r: r["layers"][0]["options"].update(sinks=True), r"sinks must be int, got True"),
        (lambda r: r.update(seal="0" * 64), r"was changed after it was written"),
    ],
)
def test_a_record_of_the_schema_before_is_read_strictly(base, tmp_path, change, message):
    """It has no hashes, so its options must all be there and be of their types."""
    _, words, model = converted(base)
    attngap.save(model, tmp_path, tokenizer=words)
    record = json.loads((tmp_path / "attngap.json").read_text()) | {"schema": "attngap.conversion/1"}
    record = {name: x for name, x in record.items() if name not in ("adapter", "seal")}
    change(record)
    (tmp_path / "attngap.json").write_text(json.dumps(record))
    with pytest.raises(AttngapError, match=message):
        attngap.load(tmp_path)


def test_a_full_folder_needs_nothing_else(base, tmp_path):
    original, words, model = converted(base)
    save(model, tmp_path / "here", tokenizer=words, original=original)
    (tmp_path / "here").rename(tmp_path / "there")
    assert torch.equal(logits(attngap.load(tmp_path / "there")[0]), logits(model))
    assert json.loads((tmp_path / "there" / "attngap.json").read_text())["base"]["name"] == "base"


OPEN = "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
TRUST = OPEN.replace("argv[1])", "argv[1], trust_remote_code=True)")
PIPELINE = "p = pipeline('text-generation', sys.argv[1], trust_remote_code=True); print(type(p.model).__name__)"


def in_a_new_process(code, folder, home):
    """Transformers copies a folder's code into its home, which here is a place of the test's own."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", f"import sys; {code}", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(f"from transformers import AutoModelForCausalLM; import attngap; {OPEN}", id="attngap imported"),
        pytest.param(f"from transformers import AutoModelForCausalLM; {TRUST}", id="attngap not imported"),
        pytest.param(f"from transformers import pipeline; {PIPELINE}", id="pipeline"),
    ],
)
def test_auto_classes_open_a_folder(base, tmp_path, code):
    _, words, model = converted(base)
    save(model, tmp_path / "fast", tokenizer=words)
    done = in_a_new_process(code, tmp_path / "fast", tmp_path / "home")
    assert done.stdout.strip() == "LlamaForCausalLM", done.stderr


def test_a_folder_says_what_to_install(base, tmp_path):
    _, words, model = converted(base)
    save(model, tmp_path / "fast", tokenizer=words)
    (tmp_path / "attngap.py").write_text("raise ModuleNotFoundError(\"No module named 'attngap'\")")
    absent = f"sys.path.insert(0, {str(tmp_path)!r}); from transformers import AutoModelForCausalLM; {TRUST}"
    done = in_a_new_process(absent, tmp_path / "fast", tmp_path / "home")
    assert "pip install attngap" in done.stderr.splitlines()[-1]


def test_importing_attngap_imports_neither_torch_nor_transformers():
    code = "import attngap, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_adapter_on_a_wrong_base_is_refused(base, tmp_path):
    _, words, model = converted(base)
    save(model, tmp_path / "adapter", tokenizer=words)
    other = tiny()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    other.save_pretrained(tmp_path / "other")
    words.save_pretrained(tmp_path / "other")
    with pytest.raises(AttngapError, match=r"was made from other weights than .*other' has: sha256 .* expected"):
        load_converted(tmp_path / "adapter", base=str(tmp_path / "other"))
    with pytest.raises(AttngapError, match=r"is an adapter of .*, which did not load"):
        load_converted(tmp_path / "adapter", base=str(tmp_path / "nowhere"))


def test_lora_is_saved_and_loaded(base, tmp_path):
    original, words, model = converted(base, lora=2, joint=2)
    assert any(".lora_" in name for name, _ in model.named_parameters())
    assert not any(".lora_" in name for name, _ in original.named_parameters())
    save(model, tmp_path, tokenizer=words)
    assert torch.equal(logits(attngap.load(tmp_path)[0]), logits(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"layers"', '"layres"'), r"attngap.json' is wrong at 'layers': Field required"),
        (lambda text: text.replace("attngap.conversion/2", "attngap.conversion/9"), r"is wrong at 'schema'"),
        (
            lambda text: text.replace('"keep":[1]', '"keep":[]').replace('"layer":0', '"layer":7'),
            r"was changed after it was written",
        ),
    ],
)
def test_a_damaged_record_is_refused(base, tmp_path, change, message):
    _, words, model = converted(base)
    save(model, tmp_path, tokenizer=words)
    path = tmp_path / "attngap.json"
    path.write_text(change(json.dumps(json.loads(path.read_text()), separators=(",", ":"))))
    with pytest.raises(AttngapError, match=message):
        load_converted(tmp_path)


def test_damaged_weights_are_refused(base, tmp_path):
    _, words, model = converted(base)
    save(model, tmp_path, tokenizer=words)
    (tmp_path / "adapter.safetensors").write_bytes(b"nothing")
    with pytest.raises(AttngapError, match=r"adapter.safetensors' is damaged or another conversion's"):
        load_converted(tmp_path)


def test_a_model_that_was_not_converted_is_not_saved(tmp_path):
    with pytest.raises(AttngapError, match="This LlamaForCausalLM was not converted by attngap"):
        attngap.save(tiny(), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(AttngapError, match="is not a converted model"):
        load_converted(tmp_path)


def test_the_hash_covers_every_weight():
    model, other = tiny(), tiny()
    assert weights_hash(model) == weights_hash(other)
    with torch.no_grad():
        other.model.embed_tokens.weight[7, 3] += 1e-6
    assert weights_hash(model) != weights_hash(other)


def test_an_encoder_is_saved_and_opened_by_automodel(tmp_path):
    tiny("bert").save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model, words = attngap.load(tmp_path / "base")
    made = plan(model)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": str(tmp_path / "base")})})
    result, _ = linearize(model, words, made, TEXT, **QUICK)
    save(result, tmp_path / "fast", tokenizer=words)
    with torch.no_grad():
        again = AutoModel.from_pretrained(tmp_path / "fast")(TOKENS).last_hidden_state
        assert torch.equal(again, result(TOKENS).last_hidden_state)


@pytest.fixture(scope="module")
def made(base):
    return converted(base)


def changed(made):
    """A copy that was trained for one step."""
    _, words, model = made
    model = copy.deepcopy(model).train()
    model(TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    return model.eval(), words


def test_what_training_changed_is_written(made, tmp_path):
    model, words = changed(made)
    assert not torch.equal(logits(model), logits(made[2]))
    for folder, original in ((tmp_path / "adapter", None), (tmp_path / "whole", made[0])):
        save(model, folder, tokenizer=words, original=original)
        assert torch.equal(logits(attngap.load(folder)[0]), logits(model))


def test_save_pretrained_and_the_trainer_write_the_conversion(made, tmp_path):
    model, words = changed(made)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))
    options = TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True)
    Trainer(model, options, processing_class=words).save_model(str(tmp_path / "trained"))
    assert torch.equal(logits(attngap.load(tmp_path / "trained")[0]), logits(model))


def test_a_cast_model_is_saved_as_it_is(made, tmp_path):
    model = copy.deepcopy(made[2]).to(torch.bfloat16)
    save(model, tmp_path, tokenizer=made[1])
    again = attngap.load(tmp_path, dtype=torch.bfloat16)[0]
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": torch.float16}, {"device_map": "cpu"}, {"local_files_only": True}]
)
def test_ordinary_arguments_of_from_pretrained_work(made, tmp_path, options):
    save(made[2], tmp_path, tokenizer=made[1])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    wanted = options.get("dtype", torch.float32)
    assert model.dtype == (getattr(torch, wanted) if isinstance(wanted, str) else wanted)
    assert (logits(model).float() - logits(made[2])).norm() < 0.1 * logits(made[2]).norm()


def test_arguments_that_are_not_taken_are_named_and_no_others(made, tmp_path):
    save(made[2], tmp_path, tokenizer=made[1])
    with pytest.raises(AttngapError, match=r"does not take quantization_config\. It takes dtype, device_map"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config={"bits": 4})
    with pytest.raises(AttngapError, match="would undo the conversion"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")


def test_a_relative_base_is_found_from_everywhere_and_never_asked_of_the_hub(tmp_path, monkeypatch):
    for name in ("models/tiny", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    tiny().save_pretrained(tmp_path / "models/tiny")
    tokenizer().save_pretrained(tmp_path / "models/tiny")
    monkeypatch.chdir(tmp_path)
    _, words, model = converted("models/tiny")
    save(model, "fast", tokenizer=words)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(logits(attngap.load("../fast")[0]), logits(model))
    (tmp_path / "models").rename(tmp_path / "moved")
    monkeypatch.setattr(socket, "socket", lambda *a, **k: pytest.fail("asked the network"))
    with pytest.raises(AttngapError, match=r"is an adapter of .*models/tiny', which did not load. No model at"):
        attngap.load("../fast")


def edit(folder, change):
    record = json.loads((folder / "attngap.json").read_text())
    change(record)
    (folder / "attngap.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["layers"][0]["options"].pop("window"),
        lambda r: r["layers"][0]["options"].update(relative="no"),
        lambda r: r["layers"][0]["options"]["map_options"].update(features=10**9),
        lambda r: r["layers"][0].update(keep=[]),
        lambda r: r.update(lora=4),
        lambda r: r.pop("lora"),
        lambda r: r.pop("seal"),
        lambda r: r["layers"][0].update(heads="4"),
    ],
)
def test_an_edited_record_is_refused_before_anything_is_built(made, tmp_path, change):
    save(made[2], tmp_path, tokenizer=made[1])
    edit(tmp_path, change)
    with pytest.raises(AttngapError, match=r"was changed after it was written|is wrong at"):
        attngap.load(tmp_path)


def test_one_flipped_bit_of_the_adapter_is_refused(made, tmp_path):
    save(made[2], tmp_path, tokenizer=made[1])
    data = bytearray((tmp_path / "adapter.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "adapter.safetensors").write_bytes(data)
    with pytest.raises(AttngapError, match="is damaged or another conversion's"):
        attngap.load(tmp_path)


def test_a_folder_that_is_its_own_base_is_refused(made, tmp_path):
    save(made[2], tmp_path, tokenizer=made[1])
    edit(tmp_path, lambda r: r["base"].update(name=str(tmp_path)))
    with pytest.raises(AttngapError, match="names itself as the model it was converted from"):
        attngap.load(tmp_path)
