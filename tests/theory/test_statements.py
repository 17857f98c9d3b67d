import re
from pathlib import Path

import pytest

from attngap.theory.statements import Statement, require, run, statements


@pytest.mark.parametrize("statement", statements(), ids=lambda s: s.claim[:50])
def test_every_statement_holds(statement):
    (outcome,) = run((statement,))
    assert outcome.holds, outcome.evidence
    assert "\n" not in outcome.evidence


def test_a_false_statement_and_a_crash_both_fail():
    def wrong():
        require(1 > 2, "1 is not above 2")

    def crash():
        raise ZeroDivisionError("no evidence")

    outcomes = list(run((Statement("1.1", "wrong", wrong), Statement("1.2", "crash", crash))))
    assert [o.holds for o in outcomes] == [False, False]
    assert outcomes[0].evidence == "RefutedError: 1 is not above 2"


def test_each_false_statement_has_its_counterexample():
    assert sum(s.counterexample for s in statements()) == 8
    assert [s.number for s in statements() if s.counterexample] == [f"6.{i}" for i in range(1, 9)]


def test_the_page_and_the_checks_have_the_same_numbers_in_the_same_order():
    """docs/theory.md names, under each number, the function that `attngap theory check` runs for it."""
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    entries = re.split(r"^### (?=\d+\.\d+ )", page, flags=re.MULTILINE)[1:]
    named = re.compile(r"^\*\*Check:\*\* `(\w+)`", flags=re.MULTILINE)
    shown = [(entry.split()[0], *named.findall(entry)) for entry in entries]
    assert shown == [(s.number, s.check.__name__) for s in statements()]


def test_code_and_pages_cite_numbers_that_exist():
    root = Path(__file__).parents[2]
    known = {s.number for s in statements()}
    for path in [*root.glob("src/**/*.py"), *root.glob("docs/**/*.md")]:
        text = path.read_text(encoding="utf-8")
        assert "THEORY" not in text, path
        cited = set(re.findall(r"docs/theory\.md (\d+\.\d+)", text)) | set(re.findall(r"\[(\d+\.\d+)\]\(theory", text))
        assert cited <= known, path
