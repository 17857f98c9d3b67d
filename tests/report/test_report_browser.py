"""The report in a real browser: it opens alone, draws, answers clicks, sorts, and reads well on a phone."""

import json
import time

import made_up
import pytest

from attngap.report.build import report_page
from attngap.report.results import read

pytestmark = pytest.mark.browser
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made_up.diagnosis(folder, name="tiny <img src=x onerror=alert(1)>")
    made_up.runs(folder / "runs.sqlite")
    (folder / "report.html").write_text(report_page(read([folder])))
    return folder


@pytest.fixture
def opened(visit, folder):
    return visit((folder / "report.html").as_uri())


def test_opens_alone_without_complaint_and_every_chart_draws(opened, folder):
    assert opened.requests == [(folder / "report.html").as_uri()]
    assert opened.complaints == []
    marks = opened.marks()
    charts = opened.page.eval_on_selector_all("[data-chart]", "all => all.map(one => one.dataset.chart)")
    assert set(charts) <= set(marks)
    assert all(count > 0 for count in marks.values()), marks
    assert marks["map"] == 24


def test_a_click_on_a_head_shows_the_numbers_of_diagnosis_json(opened, folder):
    heads = json.loads((folder / "diagnosis.json").read_text())["heads"]
    squares = opened.page.locator("#map svg .mark-rect path")
    for place in (7, 20):
        squares.nth(place).click()
        chosen = opened.page.locator("#head").get_attribute("data-open")
        head = next(head for head in heads if head["id"] == chosen)
        shown = opened.page.eval_on_selector_all(
            "#head dd", "all => Object.fromEntries(all.map(one => [one.dataset.key, Number(one.dataset.value)]))"
        )
        assert len(shown) >= 15
        assert shown == {key: head[key] for key in shown}
        assert opened.page.locator("#head h3").inner_text() == f"Head {chosen}"
        assert head["reason"] in opened.page.locator("#head .verdict").inner_text()


def test_a_square_stands_for_its_own_layer_and_head(opened):
    squares = opened.page.locator("#map svg .mark-rect path")
    boxes = []
    for place in range(24):
        squares.nth(place).click()
        layer, head = opened.page.locator("#head").get_attribute("data-open").split(".")
        box = squares.nth(place).bounding_box()
        boxes.append((int(layer), int(head), box["x"], box["y"]))
    left = {layer: x for layer, _, x, _ in boxes}
    top = {head: y for _, head, _, y in boxes}
    assert sorted(left.values()) == [left[layer] for layer in range(4)]
    assert sorted(top.values()) == [top[head] for head in range(6)]


def test_arrow_keys_walk_the_map(opened):
    page = opened.page
    page.select_option("#head [data-head]", "1.2")
    page.locator("#map .canvas").focus()
    for key, expected in (("ArrowRight", "2.2"), ("ArrowDown", "2.3"), ("ArrowLeft", "1.3"), ("ArrowUp", "1.2")):
        page.keyboard.press(key)
        assert page.locator("#head").get_attribute("data-open") == expected


def test_colors_can_be_changed_and_the_chosen_head_stays(opened):
    page = opened.page
    page.select_option("#head [data-head]", "3.1")
    before = page.eval_on_selector_all("#map .mark-rect path", "all => all.map(one => one.getAttribute('fill'))")
    page.select_option("#map [data-choice]", "floor")
    page.wait_for_function(
        "before => String([...document.querySelectorAll('#map .mark-rect path')].map(one => one.getAttribute('fill'))) "
        "!== String(before)",
        arg=before,
    )
    assert page.evaluate("attngap.views.map.signal('chosen')") == "3.1"
    assert opened.complaints == []


def test_the_picture_of_a_head_is_its_pattern(opened, folder):
    import numpy as np

    page = opened.page
    page.select_option("#head [data-head]", "2.4")
    stored = np.load(folder / "patterns.npz")["text"][2 * 6 + 4]
    opaque = page.evaluate(
        """() => { const canvas = document.querySelector('#head .pattern canvas');
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return [...data].filter((_, i) => i % 4 === 3).map(a => a > 0); }"""
    )
    assert len(opaque) == 64 * 64
    assert np.array_equal(np.array(opaque).reshape(64, 64), stored >= 4)  # 64 shades


def test_tables_sort_page_and_download_everything(opened, folder):
    page = opened.page
    heads = json.loads((folder / "diagnosis.json").read_text())["heads"]
    table = page.locator("#heads")
    table.get_by_role("button", name="floor").click()
    column = [th.inner_text() for th in table.locator("th").all()].index("floor")
    cells = [td.inner_text() for td in table.locator(f"tbody td:nth-child({column + 1})").all()]
    expected = [f"{head['floor']:.1%}" for head in sorted(heads, key=lambda head: -head["floor"])]
    assert cells == expected[:20]
    table.get_by_role("button", name="floor").click()
    assert table.locator(f"tbody td:nth-child({column + 1})").first.inner_text() == expected[-1]
    table.get_by_role("button", name="Next").click()
    assert "21–24 of 24" in table.locator(".pager").inner_text()  # noqa: RUF001
    with page.expect_download() as download:
        table.get_by_role("button", name="Download CSV").click()
    lines = download.value.path().read_text(encoding="utf-8").splitlines()
    assert len(lines) == 25
    assert lines[0].startswith("id,verdict,damage,")
    lowest = min(heads, key=lambda head: head["floor"])
    assert lines[1].split(",")[0] == lowest["id"]
    assert float(lines[1].split(",")[lines[0].split(",").index("floor")]) == lowest["floor"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, {"width": 1280, "height": 900}])
def test_accessible_and_never_wider_than_the_screen(visit, folder, scheme, viewport):
    opened = visit((folder / "report.html").as_uri(), color_scheme=scheme, viewport=viewport)
    assert opened.faults() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_markup_in_a_name_is_shown_and_not_run(opened):
    assert opened.page.locator("h1").inner_text() == "tiny <img src=x onerror=alert(1)>"
    assert opened.page.locator("img").count() == 0
    assert "<b>John</b>" in opened.page.locator("#head .reads").inner_text()


def test_prints_light_and_without_controls(opened):
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not opened.page.locator("#map [data-save]").is_visible()
    assert opened.page.pdf().startswith(b"%PDF")


def test_five_thousand_heads_stay_small_and_responsive(visit, tmp_path):
    made_up.diagnosis(tmp_path, layers=80, heads=64, side=16)
    html = report_page(read([tmp_path]))
    assert len(html.encode()) < 10e6
    (tmp_path / "report.html").write_text(html)
    opened = visit((tmp_path / "report.html").as_uri())
    assert opened.marks()["map"] == 5120
    start = time.monotonic()
    opened.page.select_option("#head [data-head]", "79.63")
    opened.page.locator("#heads").get_by_role("button", name="floor").click()
    assert opened.page.locator("#head h3").inner_text() == "Head 79.63"
    assert time.monotonic() - start < 4  # about 0.5 s alone on two cores; the margin is for a busy machine
