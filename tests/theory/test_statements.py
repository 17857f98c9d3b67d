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

    outcomes = list(run((Statement(1, "wrong", wrong), Statement(1, "crash", crash))))
    assert [o.holds for o in outcomes] == [False, False]
    assert outcomes[0].evidence == "RefutedError: 1 is not above 2"


def test_each_false_statement_has_its_counterexample():
    assert sum(s.counterexample for s in statements()) == 6
    assert all((s.section == 6) == s.counterexample for s in statements())
