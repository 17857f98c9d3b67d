"""The report in a real browser: it opens alone, draws, answers clicks, sorts, and reads well on a phone."""

import csv
import json
import random
import re
import shutil
import subprocess

import made_up
import pytest

from attngap.report.build import report_page
from attngap.report.results import read

pytestmark = pytest.mark.browser
PHONE = {"width": 390, "height": 844}
WIDE = {"width": 1280, "height": 900}
NAME = "tiny <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made_up.diagnosis(folder, name=NAME)
    made_up.receipt(folder / "converted", kept=5, model=NAME, by_length=made_up.by_length(), positions=4096)
    made_up.plan(folder / "plan.json")
    made_up.runs(folder / "runs.sqlite")
    made_up.phase(folder / "phase.json")
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


def test_the_numbers_of_ten_heads_are_those_of_diagnosis_json(opened, folder):
    heads = json.loads((folder / "diagnosis.json").read_text())["heads"]
    rank = made_up.RANKS.index(64)
    for head in random.Random(7).sample(heads, 10):
        opened.page.select_option("#head [data-head]", head["id"])
        shown = opened.page.eval_on_selector_all(
            "#head dd", "all => Object.fromEntries(all.map(one => [one.dataset.key, Number(one.dataset.value)]))"
        )
        assert len(shown) >= 18
        known = head | {name: head[f"{name}s"][rank] for name in ("recall_unavoidable", "stress_floor")}
        assert shown == {key: known[key] for key in shown}
        assert opened.page.locator("#head h3").inner_text() == f"Head {head['id']}"
        assert head["reason"][1:] in opened.page.locator("#head .verdict").inner_text()  # its first letter is a capital


def test_a_click_on_a_square_opens_its_head(opened):
    squares = opened.page.locator("#map svg .mark-rect path")
    found = set()
    for place in (7, 20):
        squares.nth(place).click()
        found.add(opened.page.locator("#head").get_attribute("data-open"))
    assert len(found) == 2


def test_the_map_shows_the_heads_that_the_receipt_kept(opened, folder):
    kept = {
        f"{layer}.{head}" for layer, head in json.loads((folder / "converted" / "receipt.json").read_text())["keep"]
    }
    wanted = {
        head["id"] for head in json.loads((folder / "diagnosis.json").read_text())["heads"] if head["verdict"] == "keep"
    }
    rows = opened.page.evaluate(
        """() => { const view = attngap.views.map, found = [];
        view.scenegraph().root.items[0].items.flatMap((group) => group.items || []).forEach((item) =>
            item.datum?.id && found.push([item.datum.id, item.datum.converted, item.fill]));
        return found; }"""
    )
    assert len(rows) == 24
    assert {id for id, what, _ in rows if what.startswith("softmax")} == kept
    assert {id for id, what, _ in rows if what in ("softmax, as planned", "replaced, traded out")} == wanted
    colors = {what: fill for _, what, fill in rows}
    assert len(set(colors.values())) == len(colors)


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
    table.get_by_role("button", name="floor, text").click()
    column = [th.inner_text() for th in table.locator("th").all()].index("floor, text")
    cells = [td.inner_text() for td in table.locator(f"tbody td:nth-child({column + 1})").all()]
    expected = [f"{head['floor']:.1%}" for head in sorted(heads, key=lambda head: -head["floor"])]
    assert cells == expected[:20]
    table.get_by_role("button", name="floor, text").click()
    assert table.locator(f"tbody td:nth-child({column + 1})").first.inner_text() == expected[-1]
    table.get_by_role("button", name="Next").click()
    assert "21–24 of 24" in table.locator(".pager").inner_text()  # noqa: RUF001
    with page.expect_download() as download:
        table.get_by_role("button", name="Download CSV").click()
    header, *lines = csv.reader(download.value.path().read_text(encoding="utf-8").splitlines())
    assert len(lines) == 24
    assert header[:7] == ["id", "verdict", "for", "does", "converted", "damage", "recall_damage"]
    lowest = min(heads, key=lambda head: head["floor"])
    assert lines[0][0] == lowest["id"]
    assert float(lines[0][header.index("floor")]) == lowest["floor"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, WIDE])
def test_accessible_and_never_wider_than_the_screen(visit, folder, scheme, viewport):
    opened = visit((folder / "report.html").as_uri(), color_scheme=scheme, viewport=viewport)
    assert opened.faults() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


@pytest.mark.parametrize("viewport", [PHONE, WIDE])
def test_no_text_lies_on_text_and_no_chart_is_cut_off(visit, folder, viewport):
    opened = visit((folder / "report.html").as_uri(), viewport=viewport)
    measures = opened.page.locator("#quality [data-choice] option").all_inner_texts()
    assert len(measures) == 4
    for measure in measures:
        opened.page.select_option("#quality [data-choice]", measure)
        opened.page.wait_for_function(
            "label => attngap.views.quality.container().textContent.includes(label)", arg=measure
        )
        assert opened.overlaps() == []
    wider = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.parentElement.id)"
    assert opened.page.eval_on_selector_all(".canvas", wider) == []
    # A cell of words is never squeezed to a word a line: that once took 4,500 pixels.
    tall = "all => Math.max(...all.map(one => one.getBoundingClientRect().height))"
    assert opened.page.eval_on_selector_all("#heads tbody tr", tall) < 90


def test_the_first_chart_is_quality_against_length(opened, folder):
    first = opened.page.locator("[data-chart]").first
    assert first.get_attribute("id") == "quality"
    assert "Right of the dashed line the text is longer than the model's own 4,096 positions." in first.inner_text()
    receipt = json.loads((folder / "converted" / "receipt.json").read_text())
    drawn = opened.page.evaluate(
        """() => attngap.views.quality.scenegraph().root.items[0].items.flatMap((group) => group.items || [])
        .flatMap((group) => group.items || [group]).filter((item) => item.datum?.part && item.shape !== undefined)
        .map((item) => [item.datum.length, item.datum.part, item.datum.value])"""
    )
    expected = [[row["length"], row["part"], row["perplexity_ratio"]] for row in receipt["by_length"]]
    assert sorted(drawn) == sorted(expected)


def test_tables_of_many_heads_are_filtered_by_words(opened):
    table = opened.page.locator("#heads")
    table.locator("[data-filter]").fill("keep 2.")
    cells = table.locator("tbody tr").all_inner_texts()
    assert cells
    assert all("keep" in cell and "2." in cell for cell in cells)
    table.locator("[data-filter]").fill("no such head")
    assert table.locator("tbody").inner_text() == "no row matches"


def test_markup_in_a_name_is_shown_and_not_run(opened):
    assert opened.page.locator("h1").inner_text() == f"{NAME}, tiny"
    assert opened.page.locator("img").count() == 0
    assert "<b>John</b>" in opened.page.locator("#head .reads").inner_text()


def test_prints_light_and_without_controls(opened):
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not opened.page.locator("#map [data-save]").is_visible()
    assert opened.page.pdf().startswith(b"%PDF")


def test_print_keeps_table_headers_and_the_names_of_heads(opened):
    opened.page.emulate_media(media="print")
    headers = opened.page.locator("#heads th button")
    assert [word for word in headers.all_inner_texts() if not word.strip()] == []
    assert all(header.is_visible() for header in headers.all())
    assert opened.page.locator("#heads tbody td:first-child button").first.is_visible()
    assert opened.page.eval_on_selector("#heads thead", "one => getComputedStyle(one).display") == "table-header-group"


def test_a_header_stands_on_every_page_that_its_table_reaches(visit, tmp_path):
    """What is printed, not what the style asks for: buttons in a header once vanished from its second page on."""
    if not shutil.which("pdftotext"):
        pytest.skip("no pdftotext on this machine; Debian: apt-get install poppler-utils")
    made_up.diagnosis(tmp_path)
    (tmp_path / "report.html").write_text(report_page(read([tmp_path])))
    opened = visit((tmp_path / "report.html").as_uri(), viewport=WIDE)
    opened.page.add_style_tag(content="@media print { #heads tbody td { padding-block: 2rem } }")  # two pages at least
    opened.page.pdf(path=tmp_path / "report.pdf", format="A4")
    done = subprocess.run(["pdftotext", "-layout", tmp_path / "report.pdf", "-"], capture_output=True, text=True)
    pages = [
        page
        for page in done.stdout.split("\f")
        if re.search(r"^ *\d+\.\d+ +(keep|replace|window)\b", page, re.MULTILINE)
    ]
    assert len(pages) > 1
    assert all("what it does" in page for page in pages)


def test_five_thousand_heads_stay_small_and_responsive(visit, tmp_path):
    made_up.diagnosis(tmp_path, layers=80, heads=64, side=16)
    html = report_page(read([tmp_path]))
    assert len(html.encode()) < 10e6
    (tmp_path / "report.html").write_text(html)
    opened = visit((tmp_path / "report.html").as_uri())
    assert opened.marks()["map"] == 5120
    before = busy(opened)
    opened.page.select_option("#head [data-head]", "79.63")
    opened.page.locator("#heads").get_by_role("button", name="floor, text").click()
    assert opened.page.locator("#head h3").inner_text() == "Head 79.63"
    assert busy(opened) - before < 2  # seconds of its own thread; about 0.3


def busy(opened) -> float:
    """Processor time that the page's main thread has used: what others do on this machine does not count."""
    session = opened.context.new_cdp_session(opened.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return found["TaskDuration"]
