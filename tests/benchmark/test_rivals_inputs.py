"""What the comparison reads: texts from packages, contexts by length, scores of heads by window."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark.rival_models import llama, tokens

MAIL = """From: a@b.c
Subject: hello
Content-Type: multipart/mixed; boundary="cut"

--cut
Content-Type: text/html

<b>not this</b>
--cut
Content-Type: text/plain

{words}
--cut--
"""


def test_texts_are_bodies_of_mail_and_chapters_in_their_order(rivals, tmp_path, capsys):
    mail, essays, book = (tmp_path / name for name in ("s/data/easy-ham-1", "a/anarchism/markdown", "m/data"))
    for folder in (mail, book):
        folder.mkdir(parents=True)
    (mail / "1.txt").write_text(MAIL.format(words="spoken " * 40))
    (mail / "2.txt").write_text(MAIL.format(words="short"))
    for number in (10, 2):
        (book / f"chapter_{number}.txt").write_text(f"Chapter {number}. " + "word " * 60)
    asked = SimpleNamespace(model=tmp_path, output=tmp_path)
    rivals.texts.texts(asked)
    assert (tmp_path / "mail.txt").read_text() == ("spoken " * 40).strip() + "\n"
    chapters = (tmp_path / "book.txt").read_text()
    assert 0 <= chapters.index("Chapter 2.") < chapters.index("Chapter 10.")
    assert "apt-get download anarchism" in capsys.readouterr().out
    essays.mkdir(parents=True)
    (essays / "secA1.md.gz").write_bytes(gzip.compress(b"essay " * 50))
    rivals.texts.texts(asked)
    assert (tmp_path / "essays.txt").read_text() == ("essay " * 50).strip() + "\n"


def prepared(rivals, folder, lengths) -> None:
    rows = [{"kind": kind, "length": n, "example": i} for n in lengths for kind in ("text", "lookup") for i in (0, 1)]
    (folder / rivals.asking.CONTEXTS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_first_context_of_each_length_comes_before_the_second_of_any(rivals, tmp_path, capsys):
    prepared(rivals, tmp_path, (64, 128))
    asked = SimpleNamespace(output=tmp_path, lengths=[128, 64], examples=2, kinds=["text"])
    assert [(row["example"], row["length"]) for row in rivals.contexts.wanted(asked)] == [
        (0, 128),
        (0, 64),
        (1, 128),
        (1, 64),
    ]
    assert not capsys.readouterr().out


def test_a_length_without_contexts_is_named_with_the_step_that_makes_them(rivals, tmp_path, capsys):
    prepared(rivals, tmp_path, (64,))
    asked = SimpleNamespace(output=tmp_path, lengths=[64, 4096], examples=1, kinds=["text"])
    assert len(rivals.contexts.wanted(asked)) == 1
    assert "No context of 4096 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"No context of 4096 tokens.*prepare --lengths 4096"):
        rivals.costs.text_of(tmp_path, 4096)


def test_costs_of_what_is_not_installed_are_skipped_by_name(rivals, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals.presses.importlib.util, "find_spec", lambda name: None)
    rivals.costs.kvpress_costs(SimpleNamespace(output=tmp_path))
    assert "KVzip, DuoAttention skipped: kvpress is not installed here" in capsys.readouterr().out


def test_scores_of_the_narrowest_window_that_holds_a_form_are_its_own(rivals, tmp_path):
    heads = rivals.heads
    for window in (None, 32, 128):
        heads.scores_path(tmp_path, "our", window).write_text(json.dumps({"groups": [[window]], "seconds": 1}))
    found = {window: heads.read_scores(tmp_path, "our", window) for window in (None, 16, 32, 64, 256)}
    assert found == {None: [[None]], 16: [[32]], 32: [[32]], 64: [[128]], 256: [[None]]}
    assert heads.read_scores(tmp_path, "duo", 64) is None
    with pytest.raises(SystemExit, match="python benchmarks/rivals scores"):
        rivals.conversions.our_scores(tmp_path / "nowhere")


@torch.no_grad()
def test_costs_are_of_a_second_reading_and_are_measured_once(rivals, tmp_path):
    model, read = llama(), []
    row = {"kind": "text", "length": 128, "example": 0, "context": tokens(100)}
    (tmp_path / rivals.asking.CONTEXTS).write_text(json.dumps(row) + "\n")

    def compress(context):
        read.append(len(context))
        full, *_ = rivals.presses.prefill(model, {"context": context}, {})
        return model, rivals.presses.as_cache(full)

    for _ in range(2):
        rivals.costs.Costs(tmp_path, 128).note("original", compress)
    assert read == [100, 100]  # the first is not timed; the other run finds the line
    (line,) = rivals.asking.read_lines(tmp_path / rivals.costs.COSTS)
    assert (line["method"], line["length"]) == ("original", 128)
    assert line["prompt"] > line["token"] > 0


@torch.no_grad()
def test_a_cell_that_kvpress_cannot_mask_is_skipped_by_name(rivals, tmp_path, capsys, monkeypatch):
    def refuse(*args):
        raise ValueError("no fake keys")

    model, row = llama(), {"kind": "text", "length": 64, "example": 0, "context": tokens(60), "questions": []}
    full, *_ = rivals.presses.prefill(model, row, {})
    answers = rivals.asking.Answers(tmp_path)
    monkeypatch.setattr(answers, "ask", refuse)
    masks = [(torch.tensor([0]),) * 3] * 2
    rivals.presses._ask_masked(model, row, full, masks, answers, "KVzip", 0.25, 0.0)
    assert "KVzip skipped at 25% of 64 tokens of text: no fake keys" in capsys.readouterr().out
    assert all(layer.self_attn.masked_key_indices is None for layer in model.model.layers)
