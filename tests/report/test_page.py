"""The page: self-contained, escaped, packed once."""

import base64
import json
import zlib

from attngap.charts.heads import head_map
from attngap.report.page import Chart, Column, Fact, Facts, Section, Table, Text, render, show

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def packed(html: str) -> dict:
    blob = html.split('id="packed">')[1].split("</script>")[0]
    return json.loads(zlib.decompress(base64.b64decode(blob)))


def test_markup_is_text_wherever_it_comes_from():
    table = Table("t", HOSTILE, [Column("a", HOSTILE)], [{"a": HOSTILE}])
    blocks = [Text([HOSTILE]), Text([HOSTILE], "pre"), Facts([Fact(HOSTILE, HOSTILE, HOSTILE)]), table]
    html = render(HOSTILE, [Section("s", HOSTILE, blocks, HOSTILE)], subtitle=HOSTILE, answer=[HOSTILE])
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert html.count("&lt;img src=x") >= 9
    assert packed(html)["tables"]["t"]["rows"]["columns"] == [[HOSTILE]]


def test_no_address_outside_is_asked_for():
    html = render("t", [])
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in html
    assert "connect-src 'self'" in render("t", [], live=True)
    for attribute in ('src="http', 'href="http', "@import", "url(http"):
        assert attribute not in html


def test_equal_rows_are_packed_once_however_many_charts_draw_them():
    heads = [{"id": "0.0", "layer": 0, "head": 0, "verdict": "keep", "floor": 0.25}]
    specs = {name: head_map(heads, name).to_dict() for name in ("verdict", "floor")}
    html = render("t", [Section("s", "s", [Chart("c", "c", "c", specs["verdict"], choices=specs)])])
    data = packed(html)
    assert len(data["data"]) == 1
    (table,) = data["data"].values()
    assert dict(zip(table["keys"], (column[0] for column in table["columns"]), strict=True)) == heads[0]
    assert data["charts"]["c"]["choices"]["floor"]["data"] == {"name": next(iter(data["data"]))}


def test_a_cell_is_shown_as_people_write_it():
    assert [show(None), show(float("nan"), ".2f"), show(True), show([1, 2])] == ["–", "–", "yes", "1, 2"]  # noqa: RUF001
    assert [show(0.1234, ".1%"), show(1234.5, ",.0f"), show(float("inf"), ".1f")] == ["12.3%", "1,234", "∞"]


def test_numbers_that_json_lacks_do_not_break_the_page():
    rows = [{"a": float("nan")}, {"a": float("inf")}]
    html = render("t", [Section("s", "s", [Table("t", "t", [Column("a", "a", ".2f")], rows)])])
    assert packed(html)["tables"]["t"]["rows"]["columns"] == [[None, "Infinity"]]
