"""Precision and device are asked for by name; what this machine cannot do is told before anything is loaded."""

import os
import stat
import sys

import pytest
import torch

import attngap
from attngap.errors import AttngapError
from attngap.models import placement
from attngap.models.placement import check_products, device_of, parse_device, parse_dtype
from attngap.models.save import read_record
from tests.conversion.small import TEXT
from tests.zoo import tiny, tokenizer

CONVERT = {"context": 64, "tokens": 256, "steps": 1, "joint": 0, "rounds": 0, "window": 8, "measured": False}


@pytest.fixture
def folder(tmp_path):
    tiny().to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize(
    ("asked", "found"),
    [(None, torch.float32), ("auto", torch.bfloat16), ("float16", torch.float16), (torch.float64, torch.float64)],
)
def test_a_model_is_loaded_in_the_precision_asked_for(folder, asked, found):
    model, _ = attngap.load(folder, dtype=asked)
    assert {p.dtype for p in model.parameters()} == {found}


def test_dtypes_by_name():
    assert parse_dtype("torch.bfloat16") is torch.bfloat16
    with pytest.raises(AttngapError, match=r"^No dtype 'bfloat17'. Did you mean 'bfloat16'\? Allowed: auto, float32"):
        parse_dtype("bfloat17")


def test_devices_that_are_not_there():
    assert parse_device("cpu") == torch.device("cpu")
    with pytest.raises(AttngapError, match=r"^No device 'gpu'. Allowed: cpu, cuda, cuda:1, mps, auto$"):
        parse_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(AttngapError, match=r"^No device 'cuda:7': torch .* sees no CUDA device. Try: auto$"):
            parse_device("cuda:7")
    if not torch.backends.mps.is_available():
        assert parse_device("auto").type in ("cpu", "cuda")
        with pytest.raises(AttngapError, match="No device 'mps'"):
            parse_device("mps")


def test_device_and_device_map_are_not_both_given(folder):
    with pytest.raises(AttngapError, match="both say where the model goes"):
        attngap.load(folder, device="cpu", device_map="cpu")


@pytest.mark.parametrize("how", ["kill -ILL $$", "echo 'RuntimeError: not implemented for Half' >&2; exit 1"])
def test_a_processor_that_cannot_multiply_in_half_precision_says_so(folder, how, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{how}\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(sys, "executable", os.fspath(script))
    check_products.cache_clear()
    try:
        with pytest.raises(AttngapError, match=r"^cpu cannot multiply in bfloat16 \((signal 4|.*Half)\). Nothing was"):
            attngap.load(folder, dtype="bfloat16")
        with pytest.raises(AttngapError, match="cannot multiply in bfloat16"):
            attngap.load(folder, dtype="auto")
        attngap.load(folder, dtype="float32")
    finally:
        check_products.cache_clear()


def test_the_device_of_a_model_is_where_its_weights_are():
    assert device_of(tiny()) == torch.device("cpu")
    assert device_of(tiny().to("meta")) == torch.device("cpu")  # only hooks could run such a model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_loads_as_it_was_converted(folder, tmp_path, dtype):
    """A float32 checkpoint converted in bfloat16 has other weights than it has in float32: the record says which."""
    tiny().save_pretrained(tmp_path / "single")
    tokenizer().save_pretrained(tmp_path / "single")
    model, words = attngap.load(tmp_path / "single", dtype=dtype)
    made, _ = attngap.linearize(
        model, words, None, TEXT, directory=tmp_path / "out", name=str(tmp_path / "single"), **CONVERT
    )
    assert read_record(tmp_path / "out").base.dtype == dtype
    again, _ = attngap.load(tmp_path / "out")
    assert again.dtype == getattr(torch, dtype)
    tokens = torch.arange(1, 33)[None]
    assert torch.equal(again(tokens).logits, made(tokens).logits)
    other, _ = attngap.load(tmp_path / "out", dtype="float16")
    assert other.dtype == torch.float16


def test_half_precision_is_read_as_it_is(folder, tmp_path, monkeypatch):
    """The weights of a bfloat16 checkpoint have the same hash in either precision, so one reading serves."""
    model, words = attngap.load(folder)
    attngap.linearize(model, words, None, TEXT, directory=tmp_path / "out", name=str(folder), **CONVERT)
    read = []
    original = attngap.models.save.load_model
    monkeypatch.setattr(attngap.models.save, "load_model", lambda *a, **k: read.append(k["dtype"]) or original(*a, **k))
    attngap.load(tmp_path / "out", dtype="bfloat16")
    assert read == [torch.bfloat16]


def test_clocks_wait_for_the_device():
    placement.synchronize(torch.device("cpu"))
