from attngap.report.sections.conversion import _off_scale
from attngap.report.sections.provenance import _row
from attngap.report.sections.receipts import limit, longest, measurements


def timed(*contexts: int) -> list[dict]:
    return [{"context": context, "decode": 1.0, "cache_bytes": context} for context in contexts]


def row(length: int, part: str, divergence: float) -> dict:
    return {"length": length, "part": part, "divergence": divergence}


def receipt(**changes) -> dict:
    return {
        "options": {"context": 512, "length": 8192, "window": 256, "sinks": 4},
        "quality": {},
        "notes": [],
    } | changes


def test_gains_are_quoted_where_the_model_has_positions():
    speed = {"original": timed(1024, 8192, 16384), "converted": timed(1024, 8192, 16384)}
    assert longest({"speed": speed, "positions": 8192})["context"] == 8192
    assert longest({"speed": speed, "positions": None})["context"] == 16384
    assert longest({"speed": speed, "positions": 512})["context"] == 16384  # nothing else was timed
    assert longest({"speed": {}}) is None


def test_what_replaced_heads_read_beyond_their_length_is_said_where_it_is_true():
    near = "the first 4 and the last 256 tokens only."
    said = "positions cannot be undone: from token 512 on replaced heads read sinks and window only"
    assert limit(receipt(notes=[said])) == f"Beyond 512 tokens replaced heads read {near}"
    before = {"context": 512, "window": 256, "sinks": 4}  # conversions that were for no length ended there too
    assert limit(receipt(options=before)) == f"Beyond 512 tokens replaced heads read {near}"
    # Features that hold over a length are not said to end at the length of short passages.
    quality = {"original": {"divergence": 0.0}, "converted": {"divergence": 0.1}}
    assert limit(receipt(quality=quality)) == "Quality was measured up to 512 tokens; nothing is claimed beyond."
    rows = [row(1024, "converted", 0.1), row(1024, "without features", 0.2)]
    assert limit(receipt(by_length=rows)) == "Quality was measured up to 1,024 tokens; nothing is claimed beyond."
    worse = [*rows, row(4096, "converted", 0.3), row(4096, "without features", 0.3)]
    assert limit(receipt(by_length=worse)) == f"From 4,096 tokens on replaced heads do no better than with {near}"


def test_later_measurements_stand_beside_those_of_the_conversion():
    first, later = [row(1024, "converted", 0.1)], [row(1024, "converted", 0.2)]
    entry = {"time": "2026-11-18T04:00:00+00:00", "text": "speech.txt", "quality": {}, "by_length": later}
    found = measurements(receipt(by_length=first, entries=[entry]))
    assert found == [("held out of the calibration text", first), ("speech.txt, 2026-11-18", later)]


def test_a_part_that_would_flatten_the_others_is_said_and_not_drawn():
    rows = [
        {"length": 1024, "part": part, "perplexity_ratio": ratio}
        for part, ratio in (("converted", 1.02), ("without features", 1.2), ("without window", 422.0))
    ]
    assert _off_scale(rows) == {"without window": 422.0}
    assert _off_scale(rows[:2]) == {}


def test_the_sources_say_what_computed_the_far_part():
    made = {"versions": {"torch": "2.13.0"}, "far_part": "flash-linear-attention 0.6.0"}
    assert _row("receipt.json", "receipt", made)["versions"] == "torch 2.13.0, far part by flash-linear-attention 0.6.0"
    assert _row("receipt.json", "receipt", made | {"far_part": None})["versions"] == "torch 2.13.0"
