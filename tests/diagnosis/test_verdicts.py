"""Verdicts say in words what the numbers show."""

from attngap.diagnosis.result import Head
from attngap.diagnosis.verdicts import set_verdicts

BASE = {"layer": 0, "kv_head": 0, "verdict": "replace", "reason": "", "entropy": 0.5, "top": 0.2, "kappa": 0.5}
BASE |= {"kappa_p10": 0.1, "kappa_p90": 0.9, "selecting": 0.1, "on_sink": 0.2, "n_star": 50.0, "spread": 3.0}
BASE |= {"logit_ratio": 0.8}


def head(number: int, sink: float, near: float, **more) -> Head:
    place = {"id": f"0.{number}", "head": number, "sink": sink, "near": near, "far": 1 - sink - near}
    return Head(**BASE | place | more)


def measured(importance: float, damage: float, unavoidable: float = 0.0) -> dict:
    return {
        "importance": importance,
        "damage": damage,
        "recall_damage": damage / 2,
        "unavoidable": unavoidable,
        "lost": damage - unavoidable,
        "recall_unavoidable": damage / 2,
        "floor": 0.18,
        "stress_floor": 0.226,
    }


def test_words():
    heads = [
        head(0, 0.1, 0.1, induction=0.6, **measured(0.9, 0.02, 0.015)),
        head(1, 0.75, 0.24, **measured(0.05, 0.0001)),
        head(2, 0.6, 0.2, **measured(0.04, 0.0002)),
        head(3, 0.1, 0.8, **measured(0.01, 0.0002)),
    ]
    set_verdicts(heads, 0.25, 64)
    assert [one.verdict for one in heads] == ["keep", "window", "replace", "replace"]
    assert heads[0].reason == (
        "kept for text: replacing it costs 0.02 nats there, 97.6% of all heads' (on recall 0.01, 97.6%); "
        "a retrieval head: puts 60% on the token to copy when text repeats; "
        "no weights of rank 64 come nearer than 18.0% on text, 22.6% on recall; "
        "with the best of them 75% of its damage on text and 100% of its damage on recall would remain"
    )
    assert (
        heads[1].reason
        == "75% on the first tokens, 24% nearby, 1% far; a window is enough, at most 1.0% lies beyond it"
    )
    assert heads[2].reason.startswith("60% on the first tokens, 20% nearby, 20% far; costs 0.0002 nats")
    assert heads[3].reason.startswith("mostly local: 80% nearby, 10% far")


def test_the_reason_names_the_number_that_decided():
    """A head that hardly matters on text and carries recall: nothing of that can be won back, and it says so."""
    recalls = head(0, 0.02, 0.96, **measured(0.5, 0.001) | {"recall_damage": 0.112, "recall_unavoidable": 0.117})
    reads = head(1, 0.1, 0.1, **measured(0.4, 0.01) | {"recall_damage": 0.001})
    set_verdicts([recalls, reads], 0.5, 64)
    assert recalls.reason.startswith(
        "kept for recall: replacing it costs 0.11 nats there, 99.1% of all heads' (on text 0.001, 9.1%); mostly local"
    )
    assert recalls.reason.endswith("0% of its damage on text and 100% of its damage on recall would remain")


def test_a_window_is_enough_only_where_sequences_repeat_too():
    heads = [head(0, 0.5, 0.495, stress_far=0.3), head(1, 0.5, 0.495, stress_far=0.01)]
    set_verdicts(heads, 0.0, None)
    assert [one.verdict for one in heads] == ["replace", "window"]


def test_without_damage_statistics_decide():
    heads = [
        head(0, 0.1, 0.1, kappa=1.4),
        head(1, 0.1, 0.1, induction=0.5),
        head(2, 0.1, 0.1),
        head(3, 0.5, 0.49),
        head(4, 0.2, 0.3, previous=0.8),
        head(5, 0.2, 0.3, duplicate=0.4),
    ]
    set_verdicts(heads, 0.1, None)
    assert [one.verdict for one in heads] == ["keep", "keep", "replace", "window", "replace", "replace"]
    assert heads[0].reason == "selects single tokens, 80% of it far away"
    assert heads[2].reason == "spreads widely: 80% far, top weight 20%"
    assert heads[4].reason == "reads the token before (80%)"
    assert heads[5].reason == "finds earlier copies of the same token (40%)"


def test_what_cannot_be_replaced_keeps_its_own_reason():
    stuck = head(0, 0.1, 0.1, replaceable=False, reason="stays: for a reason")
    set_verdicts([stuck], 0.0, 64)
    assert (stuck.verdict, stuck.reason) == ("keep", "stays: for a reason")
