"""Pictures of heads: coarser only by taking the largest weight, and said so."""

import numpy as np
import pytest

from attngap.errors import AttngapError
from attngap.report import patterns


def write(folder, **arrays):
    np.savez_compressed(folder / "patterns.npz", **arrays)
    return folder / "diagnosis.json"


def test_a_picture_that_fits_is_left_alone(tmp_path):
    stack = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    found = patterns.read_patterns(write(tmp_path, text=stack), 3, tokens=8)
    assert np.array_equal(found.pictures["text"], stack)
    assert found.passages()[0]["caption"].endswith("a row is a query, a column a key.")


def test_coarser_pictures_keep_the_largest_weight_of_each_cell(tmp_path, monkeypatch):
    stack = np.random.default_rng(0).integers(0, 256, (3, 7, 7), dtype=np.uint8)
    monkeypatch.setattr(patterns, "BUDGET", 3 * 16)
    found = patterns.read_patterns(write(tmp_path, text=stack), 3, tokens=1024)
    small = found.pictures["text"]
    assert small.shape == (3, 4, 4)
    for i in range(4):
        for j in range(4):
            assert np.array_equal(small[:, i, j], stack[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max((1, 2)))
    assert "the largest weight among 256 x 256" in found.passages()[0]["caption"]


def test_pictures_of_another_diagnosis_are_refused(tmp_path):
    path = write(tmp_path, text=np.zeros((3, 8, 8), np.uint8))
    with pytest.raises(AttngapError, match=r"does not fit its diagnosis: text is \(3, 8, 8\), heads are 4"):
        patterns.read_patterns(path, 4, tokens=8)


def test_no_pictures_after_a_quick_diagnosis(tmp_path):
    assert patterns.read_patterns(tmp_path / "diagnosis.json", 4, tokens=8) is None
