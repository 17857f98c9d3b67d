"""What the page once said wrongly, and each figure with the length it was measured at."""

import json
import re

import made_up
import pytest

from attngap.report.build import report_page
from attngap.report.page import Chart, HeadPanel, Panels, Table
from attngap.report.results import Result, read
from attngap.report.sections.answer import from_receipt
from attngap.report.sections.conversion import conversion_sections
from attngap.report.sections.heads import damage_line, head_rows, head_sections
from attngap.report.sections.receipts import at_longest, facts, fitted
from attngap.report.sections.speed import speed_section
from attngap.report.sections.theory import theory_sections

ROWS = [
    {"length": 1024, "part": "original", "perplexity_ratio": 1.0, "needle": 0.9, "repetition": None},
    {"length": 1024, "part": "converted", "perplexity_ratio": 1.02, "needle": 0.8, "repetition": None},
    {"length": 8192, "part": "original", "perplexity_ratio": 1.0, "needle": 0.7, "repetition": None},
    {"length": 8192, "part": "converted", "perplexity_ratio": 1.3, "needle": 0.1, "repetition": None},
]


def receipt(folder, **changes) -> Result:
    return Result("receipt", folder / "receipt.json", made_up.receipt(folder, **changes))


def test_every_figure_of_quality_carries_its_length(tmp_path):
    found = facts(receipt(tmp_path, by_length=ROWS, positions=8192))
    quality = [fact.label for fact in found if re.search("perplexity|predicted|recalled|cache|speed", fact.label)]
    assert len(quality) == 5
    assert all(re.search(r"\d tokens$", label) for label in quality)
    sentence = from_receipt(receipt(tmp_path, by_length=ROWS, positions=8192).content)[1]
    assert "30.0% higher on held-out text of 8,192 tokens" in sentence
    assert "recall of a repeated sequence is 87% of the original's at 1,024" in sentence


def test_nothing_is_quoted_beyond_the_models_own_positions(tmp_path):
    content = receipt(tmp_path, by_length=ROWS, positions=4096).content
    assert at_longest(content, "perplexity_ratio") == (1024, {"original": 1.0, "converted": 1.02})
    assert "8,192" not in from_receipt(content)[1]


def test_what_was_measured_at_one_length_only_is_quoted_there(tmp_path):
    """Recall of a repeated sequence has no rows by length; the page once left it out for that."""
    content = receipt(tmp_path, by_length=ROWS, positions=8192).content
    length, here = at_longest(content, "repetition")
    assert length == content["options"]["context"]
    assert here["converted"] == content["quality"]["converted"]["induction"]


def test_baselines_of_other_passages_have_a_table_of_their_own(tmp_path):
    """Side by side with figures of other passages random heads once looked better than the conversion."""
    receipt(tmp_path, by_length=ROWS)
    (section, *_) = conversion_sections(read([tmp_path]))
    tables = {block.id: block for block in section.blocks if isinstance(block, Table)}
    assert {row["part"] for row in tables["quality-table"].rows} == {"original", "converted"}
    baselines = {row["part"]: row["perplexity_ratio"] for row in tables["baselines-table"].rows if "perplexity" in row}
    assert set(baselines) == {"original", "converted", "without features", "random heads"}
    made_up.receipt(tmp_path)  # as they were before there were lengths: all in one
    (section, *_) = conversion_sections(read([tmp_path]))
    tables = {block.id: block for block in section.blocks if isinstance(block, Table)}
    assert "baselines-table" not in tables
    assert "random heads" in {row["part"] for row in tables["quality-table"].rows}


def test_of_several_conversions_headline_and_pictures_are_of_one(tmp_path):
    """The headline was once of the first folder and the first picture of the one that kept least."""
    rows = [
        {"length": 1024, "part": part, "perplexity_ratio": ratio}
        for part, ratio in (("original", 1.0), ("converted", 1.07))
    ]
    made_up.receipt(tmp_path / "a", kept=12, by_length=rows)
    made_up.receipt(tmp_path / "b", kept=3, by_length=made_up.by_length((1024,)))
    results = read([tmp_path])
    assert from_receipt(results.of("receipt")[0].content, "a")[0].startswith("a: Keep softmax on 12 of 24 heads")
    quality, speed = conversion_sections(results)[:2]
    (first, *_) = [block for block in quality.blocks if isinstance(block, Chart)]
    assert first.title == "Quality at 1,024 tokens, a"
    drawn = json.loads(first.spec["data"]["values"])
    assert [row["value"] for row in drawn] == [1.0, 1.07]
    assert speed.blocks[0].title == "Decoding speed, a"
    assert "a: Keep softmax on 12 of 24 heads" in report_page(results)


def test_one_thing_has_one_name(tmp_path):
    names = {row["part"] for row in fitted(receipt(tmp_path).content)}
    assert "sinks + window only" not in names
    assert "sinks + window only" not in report_page(read([tmp_path]))


def test_of_the_damage_on_recall_what_remains_is_said_beside_that_on_text():
    """ "Of all damage 0% would remain" was text only; of recall 46% remained."""
    rows = [
        {"damage": 1.0, "unavoidable": 0.0, "recall_damage": 0.5, "recall_unavoidable": 0.6},
        {"damage": 1.0, "unavoidable": 0.0, "recall_damage": 0.5, "recall_unavoidable": 0.0},
    ]
    assert "and 0% of it would remain" in damage_line(rows, "damage", "unavoidable", 64)
    assert "On recall" in (line := damage_line(rows, "recall_damage", "recall_unavoidable", 64))
    assert "and 50% of it would remain" in line  # what remains of a damage is at most all of it


def test_text_and_recall_stand_side_by_side_wherever_damage_does(tmp_path):
    made_up.diagnosis(tmp_path)
    result = read([tmp_path]).of("diagnosis")[0]
    heads, damage, _ = head_sections(result)
    (chart,) = [block for block in heads.blocks if isinstance(block, Chart)]
    assert {"damage on text", "damage on recall", "unavoidable on text", "unavoidable on recall"} <= set(chart.choices)
    tips = {tip["field"] for tip in chart.spec["encoding"]["tooltip"]}
    assert {"damage", "recall_damage"} <= tips
    (panel,) = [block for block in heads.blocks if isinstance(block, HeadPanel)]
    (table,) = [block for block in heads.blocks if isinstance(block, Table)]
    for columns in (panel.fields, table.columns):
        assert {"damage", "recall_damage", "recall_unavoidable", "stress_floor"} <= {one.key for one in columns}
    assert re.findall(r"On (text|recall) the worst", damage.lead) == ["text", "recall"]
    (split,) = [block for block in damage.blocks if isinstance(block, Panels)]
    assert [one.title for one in split.charts] == ["On text", "On recall"]
    reasons = {row["id"]: row["words"] for row in head_rows(result) if row["verdict"] == "keep"}
    assert all(words.startswith("Kept for recall: replacing it costs 0.11 nats there") for words in reasons.values())


def test_orders_and_units_are_named_alike_everywhere(tmp_path):
    """Captions once said first order where documents said second; caches were in two kinds of megabytes."""
    made_up.diagnosis(tmp_path)
    made_up.plan(tmp_path / "plan.json", predicts=False)
    content = made_up.receipt(tmp_path / "converted")
    page = report_page(read([tmp_path]))
    assert "irst-order" not in page
    assert page.count("Second-order") == 2
    found = [fact for fact in facts(Result("receipt", tmp_path, content)) if fact.label.startswith("cache")]
    assert [fact.detail for fact in found] == ["160 → 20 MB"]
    one = Result("receipt", tmp_path / "r.json", content)
    (table,) = [block for block in speed_section([one], one).blocks if isinstance(block, Table)]
    assert {row["cache_mb"] for row in table.rows} == {8.0, 20.0, 40.0, 160.0}


@pytest.mark.parametrize("kind", ["diagnosis", "receipt", "plan", "phase", "runs"])
def test_each_chart_has_a_sentence_that_says_what_to_see(tmp_path, kind):
    write = getattr(made_up, kind)
    write(tmp_path if kind in ("diagnosis", "receipt") else tmp_path / f"{kind}.{'db' if kind == 'runs' else 'json'}")
    figures = re.findall(r'<figure class="chart".*?</figure>', report_page(read([tmp_path])), re.DOTALL)
    assert figures
    for figure in figures:
        (caption,) = re.findall(r"<figcaption>(.*?)</figcaption>", figure)
        assert len(caption.split()) > 8
        assert caption.endswith(".")


def test_a_log_axis_has_its_unit_and_a_diagram_its_key(tmp_path):
    made_up.phase(tmp_path / "phase.json")
    (section,) = theory_sections(read([tmp_path]))
    over_length = [block for block in section.blocks if isinstance(block, Panels)][1]
    titles = re.findall(r'"title": "(context n, tokens)"', json.dumps(over_length.charts[0].spec))
    assert titles
    assert over_length.key[0] == ("viridis", "probability of success, 0 to 1")
