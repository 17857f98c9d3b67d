"""Conversions: quality beside the original and two baselines, speed and memory against context."""

from collections.abc import Sequence
from typing import Any

from attngap.charts import conversion as charts
from attngap.report.page import Block, Chart, Column, Fact, Section, Table, Text
from attngap.report.results import Result, Results

Row = dict[str, Any]
QUALITY = (
    Column("folder", "result"),
    Column("model", "model"),
    Column("kept", "heads kept", ".1%"),
    Column("perplexity", "perplexity", ".3f"),
    Column("perplexity_ratio", "x original", ".4f"),
    Column("divergence", "KL, nats a token", ".4f"),
    Column("induction", "induction", ".1%", "share of a repeated random sequence that is predicted"),
    Column("needle", "needle", ".1%", "share of the digits of a hidden number that are recalled"),
)
SPEED = (
    Column("folder", "result"),
    Column("model", "model"),
    Column("context", "context", ",.0f"),
    Column("prefill", "prefill, tokens/s", ".3g"),
    Column("decode", "decode, tokens/s", ".3g"),
    Column("cache_mb", "cache, MB", ".3g"),
)
MEASURES = {
    "perplexity, times the original's": "perplexity_ratio",
    "KL to the original": "divergence",
    "induction": "induction",
    "needle recall": "needle",
}


def conversion_sections(results: Results) -> list[Section]:
    receipts = sorted(results.of("receipt"), key=lambda result: result.content["kept"] / result.content["heads"])
    found = []
    if receipts:
        found.append(_quality(receipts))
        if any(receipt.content.get("speed") for receipt in receipts):
            found.append(_speed(receipts))
    return found + _plans(results)


def facts(receipt: Result) -> list[Fact]:
    """The numbers a person decides on."""
    content, quality = receipt.content, receipt.content["quality"]
    before, after = quality["original"], quality["converted"]
    found = [Fact(f"{content['kept']} of {content['heads']}", "heads keep softmax", f"{content['mechanism']} replaces")]
    if after.get("perplexity_ratio"):
        detail = f"{before['perplexity']:.2f} → {after['perplexity']:.2f}"
        found.append(Fact(f"{after['perplexity_ratio'] - 1:+.1%}", "perplexity, held-out text", detail))
    for key, label in (("induction", "recall of a repeated sequence"), ("needle", "needle recall")):
        if before.get(key) is not None and after.get(key) is not None:
            found.append(Fact(f"{after[key]:.0%}", label, f"original {before[key]:.0%}"))
    gain = longest(content)
    if gain:
        saved = 1 - gain["converted"]["cache_bytes"] / gain["original"]["cache_bytes"]
        faster = gain["converted"]["decode"] / gain["original"]["decode"]
        size = f"{gain['original']['cache_bytes'] / 1e6:,.0f} → {gain['converted']['cache_bytes'] / 1e6:,.0f} MB"
        found.append(Fact(f"{saved:.0%} smaller", f"cache at {gain['context']:,} tokens", size))
        speed = f"{gain['original']['decode']:.1f} → {gain['converted']['decode']:.1f} tokens/s"
        found.append(Fact(f"{faster:.2g}x", f"decoding speed at {gain['context']:,} tokens", speed))
    return found


def longest(content: Row) -> Row | None:
    """Original and converted at the longest context that both were measured at."""
    speed = content.get("speed") or {}
    by_model = {name: {row["context"]: row for row in speed.get(name, [])} for name in ("original", "converted")}
    shared = set(by_model["original"]) & set(by_model["converted"])
    if not shared:
        return None
    return {"context": max(shared)} | {name: rows[max(shared)] for name, rows in by_model.items()}


def _quality(receipts: Sequence[Result]) -> Section:
    rows = [
        {"folder": str(receipt.path.parent), "model": name, "kept": _share(receipt, name), **values}
        for receipt in receipts
        for name, values in receipt.content["quality"].items()
    ]
    blocks: list[Block] = []
    specs = {label: spec for label, key in MEASURES.items() if (spec := _curve(rows, label, key))}
    if specs:
        alt = "Quality against the share of heads that keep softmax, for the conversion and two baselines"
        caption = (
            "The same run measures all: the original, the conversion, the same heads with sinks and window only (no "
            "feature map), and as many heads kept at random. Dots are measured; dashes only join them."
        )
        first = next(iter(specs.values()))
        blocks.append(Chart("quality", "Quality against share kept", alt, first, caption, specs, "Measure"))
    blocks.append(Table("quality-table", "Quality", _filled(QUALITY, rows), rows))
    if places := _places(receipts):
        blocks.append(Table("needle-table", "Needle recall by length and depth", _place_columns(places), places))
    notes = [note for receipt in receipts for note in receipt.content.get("notes") or []]
    if notes:
        blocks.append(Text(list(dict.fromkeys(notes)), "note"))
    return Section("quality-section", "What it costs", blocks)


def _curve(rows: Sequence[Row], label: str, key: str) -> Row | None:
    """Every line ends at the original, where all heads keep softmax."""
    known = [row for row in rows if row.get(key) is not None]
    ends = [row[key] for row in known if row["model"] == "original"]
    others = [row for row in known if row["model"] != "original"]
    if not others or not ends:
        return None
    points = [{"kept": row["kept"], "model": row["model"], "value": row[key]} for row in others]
    points += [{"kept": 1.0, "model": name, "value": ends[0]} for name in dict.fromkeys(row["model"] for row in others)]
    return charts.quality_against_kept(points, label).to_dict()


def _places(receipts: Sequence[Result]) -> list[Row]:
    """One row a place ("length@depth"), one column a model; of the first receipt that has them."""
    for receipt in receipts:
        quality = receipt.content["quality"]
        if places := quality["original"].get("needle_by_place"):
            return [
                {"place": place}
                | {name: values.get("needle_by_place", {}).get(place) for name, values in quality.items()}
                for place in places
            ]
    return []


def _place_columns(rows: list[Row]) -> list[Column]:
    return [Column("place", "tokens@depth")] + [Column(name, name, ".0%") for name in rows[0] if name != "place"]


def _speed(receipts: Sequence[Result]) -> Section:
    rows = []
    for receipt in receipts:
        for name, entries in (receipt.content.get("speed") or {}).items():
            for entry in entries:
                extra = {"folder": str(receipt.path.parent), "model": name, "cache_mb": entry["cache_bytes"] / 1e6}
                rows.append(entry | extra)
    shown = [row for row in rows if row["folder"] == rows[0]["folder"]]
    pairs = {name: [(row["context"], row["decode"]) for row in shown if row["model"] == name] for name in charts.MODELS}
    cross = charts.crossover(pairs["original"], pairs["converted"])
    speed = [{"context": row["context"], "model": row["model"], "value": row["decode"]} for row in shown]
    memory = [{"context": row["context"], "model": row["model"], "value": row["cache_mb"] * 1e6} for row in shown]
    where = "leads at every context measured" if _leads(pairs) else "does not overtake within the contexts measured"
    caption = f"The converted model overtakes the original at about {cross:,.0f} tokens." if cross else f"It {where}."
    blocks: list[Block] = [
        Chart(
            "decode",
            "Decoding speed",
            "Tokens a second against context for the original and the converted model",
            charts.against_context(speed, "tokens a second", cross).to_dict(),
            caption,
        ),
        Chart(
            "cache",
            "Cache memory",
            "Bytes of cache against context for the original and the converted model",
            charts.against_context(memory, "bytes of cache").to_dict(),
        ),
        Table("speed-table", "Speed and memory", _filled(SPEED, rows), rows),
    ]
    lead = "Original and converted in the same run, one after the other at each context."
    return Section("speed-section", "What it gains", blocks, lead)


def _leads(pairs: dict[str, list[charts.Point]]) -> bool:
    before = dict(pairs["original"])
    return all(after >= before.get(context, after) for context, after in pairs["converted"])


def _plans(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for number, plan in enumerate(results.of("plan")):
        curve = plan.content.get("curve") or []
        if not curve:
            continue
        points = [
            {"kept": point["kept"], "kind": kind, "damage": point[key]}
            for point in curve
            for kind, key in (("text", "text"), ("repeated sequence", "recall"))
        ]
        kept = len(plan.content["keep"])
        caption = (
            f"Dashed: the plan in {plan.path}, {kept} heads kept. First-order estimates, added up: errors interact."
        )
        spec = charts.predicted_damage(points, kept).to_dict()
        alt = "Damage predicted for every number of kept heads"
        blocks.append(Chart(f"plan-{number + 1}", "Predicted damage against heads kept", alt, spec, caption))
    return [Section("plan", "The choice", blocks)] if blocks else []


def _share(receipt: Result, model: str) -> float:
    return 1.0 if model == "original" else receipt.content["kept"] / receipt.content["heads"]


def _filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Without columns that no row fills, and without the folder when there is only one."""
    folders = {row.get("folder") for row in rows}
    return [
        column
        for column in columns
        if any(row.get(column.key) is not None for row in rows) and not (column.key == "folder" and len(folders) == 1)
    ]
