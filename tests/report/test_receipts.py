from attngap.report.sections.receipts import longest


def timed(*contexts: int) -> list[dict]:
    return [{"context": context, "decode": 1.0, "cache_bytes": context} for context in contexts]


def test_gains_are_quoted_where_the_model_has_positions():
    speed = {"original": timed(1024, 8192, 16384), "converted": timed(1024, 8192, 16384)}
    assert longest({"speed": speed, "positions": 8192})["context"] == 8192
    assert longest({"speed": speed, "positions": None})["context"] == 16384
    assert longest({"speed": speed, "positions": 512})["context"] == 16384  # nothing else was timed
    assert longest({"speed": {}}) is None
