"""What a conversion gains: decoding speed and cache memory against context."""

from collections.abc import Sequence
from typing import Any

from attngap.charts import conversion as charts
from attngap.report.page import Block, Chart, Column, Section, Table
from attngap.report.results import Result
from attngap.report.sections.receipts import filled, which

Row = dict[str, Any]
SPEED = (
    Column("folder", "result"),
    Column("part", "model"),
    Column("context", "context, tokens", ",.0f"),
    Column("prefill", "prefill, tokens/s", ".3g"),
    Column("decode", "decode, tokens/s", ".3g"),
    Column("cache_mb", "cache, MB", ".3g", "of 10^6 bytes"),
)


def speed_section(receipts: Sequence[Result], first: Result) -> Section:
    """Curves of `first`, or of the first that was timed; the table has all."""
    rows = [
        entry | {"folder": str(receipt.path.parent), "part": part, "cache_mb": entry["cache_bytes"] / 1e6}
        for receipt in receipts
        for part, entries in (receipt.content.get("speed") or {}).items()
        for entry in entries
    ]
    rows.sort(key=lambda row: row["context"])  # stable: at each context the original comes first
    timed = first if first.content.get("speed") else next(each for each in receipts if each.content.get("speed"))
    shown = [row for row in rows if row["folder"] == str(timed.path.parent)]
    name = f", {which(timed, receipts)}" if len(receipts) > 1 else ""
    pairs = {
        name: [(row["context"], row["decode"]) for row in shown if row["part"] == name]
        for name in ("original", "converted")
    }
    between = charts.overtakes(pairs["original"], pairs["converted"])
    speed, memory = (
        [{"context": row["context"], "part": row["part"], "value": row[key]} for row in shown]
        for key in ("decode", "cache_mb")
    )
    charted: list[Block] = [
        Chart(
            "decode",
            f"Decoding speed{name}",
            "Tokens per second against context for the original and the converted model",
            charts.against_context(speed, "tokens per second", between).to_dict(),
            _who_leads(pairs, between) + " One run on one machine; ratios carry over better than seconds do.",
        ),
        Chart(
            "cache",
            f"Cache memory{name}",
            "Megabytes of cache against context for the original and the converted model",
            charts.against_context(memory, "cache, MB").to_dict(),
            "The original's cache grows with every token; of the conversion's only what kept heads read does.",
        ),
    ]
    several = len({row["context"] for row in shown}) > 1  # two dots in a frame say less than the table below
    blocks = [*(charted if several else []), Table("speed-table", "Speed and memory", filled(SPEED, rows), rows)]
    lead = "Original and converted in the same run, one after the other at each context."
    positions = timed.content.get("positions")
    if positions and max(row["context"] for row in shown) > positions:
        lead += (
            f" Contexts beyond the model's own {positions:,} positions show speed only: its text is worthless there."
        )
    return Section("speed-section", "What it gains", blocks, lead)


def _who_leads(pairs: dict[str, list[charts.Point]], between: Sequence[int | float] | None) -> str:
    if between:
        low, high = between
        return f"The converted model overtakes the original between {low:,} and {high:,} tokens (shaded)."
    before = dict(pairs["original"])
    leads = all(after >= before.get(context, after) for context, after in pairs["converted"])
    where = "leads at every context measured" if leads else "does not overtake within the contexts measured"
    return f"The converted model {where}."
