import json
import math

import pytest

from attngap.charts.files import check_path, save
from attngap.charts.phase import diagram, phase_chart, thresholds
from attngap.errors import AttngapError


def result():
    cells = [
        {"kernel": kernel, "scale": s, "n": n, "needle": a, "success": a * (kernel == "softmax")}
        for kernel in ("softmax", "linear")
        for s, n in ((0.5, 100), (1.0, 10_000), (1.5, 10**6))
        for a in (0.2, 0.6, 1.0)
    ]
    curve = [
        {"kernel": "softmax", "scale": s, "n": n, "needle": 0.5, "curve": "exact"}
        for s, n in ((0.5, 100), (1.5, 10**6))
    ]
    part = {"cells": cells, "curves": curve}
    return {"setting": {"n": 1024, "d": 130, "m": 40, "b": 0.5, "a0": 0.05}, "scale": part, "length": part}


def lines_of(spec, layer):
    return spec["datasets"][layer["data"]["name"]].splitlines()


def test_one_panel_a_kernel_with_cells_and_curves():
    spec = diagram(result()["scale"]["cells"], result()["scale"]["curves"], "scale").to_dict()
    assert [panel["title"] for panel in spec["hconcat"]] == ["softmax", "linear"]
    heat, line = (lines_of(spec, layer) for layer in spec["hconcat"][0]["layer"])
    assert len(heat) == 1 + 9
    assert heat[1] == "0.25,0.75,0.0,0.4,0.2"  # edges halfway to the neighbors
    assert len(line) == 1 + 2


def test_length_axis_is_logarithmic():
    spec = diagram(result()["length"]["cells"], result()["length"]["curves"], "n").to_dict()
    x = spec["hconcat"][0]["layer"][0]["encoding"]["x"]
    assert x["scale"]["type"] == "log"
    low, high = x["scale"]["domain"]
    assert math.isclose(low, 10.0)
    assert math.isclose(high, 10**7)


def test_page_works_offline_and_pictures_are_pictures(tmp_path):
    chart = phase_chart(result())
    page = save(chart, tmp_path / "a" / "phase.html").read_text()
    assert "<script" in page
    assert 'src="http' not in page
    assert "linear attention with another weight separates too" in page
    assert save(chart, tmp_path / "phase.png").read_bytes()[:4] == b"\x89PNG"
    assert save(chart, tmp_path / "phase.svg").read_text().startswith("<svg")
    assert "vconcat" in json.loads(save(chart, tmp_path / "phase.json").read_text())


def test_mechanisms_that_never_separate_are_named():
    rows = [{"label": "softmax", "n": n, "needle": 0.4} for n in (128, 256)] + [
        {"label": "elu", "n": 128, "needle": None}
    ]
    spec = thresholds(rows).to_dict()
    assert spec["title"]["subtitle"] == ["never up to the largest needle tried: elu"]
    assert len(lines_of(spec, spec["layer"][0])) == 1 + 2


def test_other_files_are_refused():
    with pytest.raises(AttngapError, match=r"A chart is written as .html, .png, .svg, .json; got 'x.pdf'"):
        check_path("x.pdf")
