"""Results that are short of something, or long: nothing breaks, nothing is empty, nothing lies on anything."""

import made_up
import pytest

from attngap.report.build import report_page
from attngap.report.results import read

pytestmark = pytest.mark.browser
LONG = (
    "an-organization-with-a-long-name/a-model-whose-name-is-longer-than-any-heading-should-be-1234567890-Instruct-v0.3"
)
ENTRY = {"time": "2026-11-18T04:00:00+00:00", "text": "a folder with/long words/speech.txt", "quality": {}, "speed": {}}


def bare(folder):
    """Converted and never measured."""
    made_up.receipt(folder, quality={}, speed={}, notes=[])


def one_length(folder):
    made_up.receipt(folder, by_length=made_up.by_length((1024,)), positions=8192, speed={})


def three_lengths(folder):
    made_up.receipt(folder, by_length=made_up.by_length((1024, 4096, 8192)), positions=8192)


def measured_again(folder):
    entries = [{**ENTRY, "by_length": made_up.by_length((1024, 4096))}, {**ENTRY, "by_length": []}]
    made_up.receipt(folder, by_length=made_up.by_length((1024,)), entries=entries)


def long_names(folder):
    made_up.diagnosis(folder / ("a-folder-with-a-long-name-" * 4), name=LONG)
    converted = folder / ("a-folder-with-another-long-name-" * 4)
    made_up.receipt(converted, model=LONG, mechanism="a-mechanism-of-somebody-elses-package")
    made_up.plan(folder / "plan.json")


def plan_alone(folder):
    folder.mkdir(exist_ok=True)
    made_up.plan(folder / "plan.json")


def plan_without_a_choice(folder):
    folder.mkdir(exist_ok=True)
    made_up.plan(folder / "plan.json", kept=0, predicts=False)


def two_conversions(folder):
    for kept in (3, 12):
        made_up.receipt(folder / f"kept{kept}", kept=kept, by_length=made_up.by_length())


def one_layer(folder):
    made_up.diagnosis(folder, layers=1, heads=2)


def speed_at_one_context(folder):
    speed = {
        name: [{"context": 512, "prefill": 9.0, "decode": 9.0, "cache_bytes": 1000}]
        for name in ("original", "converted")
    }
    made_up.receipt(folder, speed=speed)


CASES = (
    bare,
    one_length,
    three_lengths,
    measured_again,
    long_names,
    plan_alone,
    plan_without_a_choice,
    two_conversions,
)
CASES += (one_layer, speed_at_one_context)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_page_is_whole(visit, tmp_path, make, width):
    make(tmp_path)
    (tmp_path / "r.html").write_text(report_page(read([tmp_path])))
    opened = visit((tmp_path / "r.html").as_uri(), viewport={"width": width, "height": 844})
    page = opened.page
    assert opened.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.overlaps() == []
    assert all(opened.marks().values())
    assert page.locator("h1").inner_text()
    assert page.locator(".hero .answer").inner_text()
    empty = "all => all.filter((one) => !one.querySelector('figure, table, p, ul, pre')).map((one) => one.id)"
    assert page.eval_on_selector_all("section", empty) == []
    assert page.eval_on_selector_all("tbody", "all => all.filter((one) => !one.children.length).length") == 0
    text = page.locator("main").inner_text()
    assert not [word for word in ("undefined", "NaN", "None", "null", "Infinity") if word in text.split()]
