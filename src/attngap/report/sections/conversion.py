"""What a conversion costs: quality at every length it was measured at, beside the original and the baselines."""

from collections.abc import Sequence
from typing import Any

from attngap.charts import conversion as charts
from attngap.report.page import Block, Chart, Column, Section, Table
from attngap.report.results import Result, Results
from attngap.report.sections.notes import notes
from attngap.report.sections.plan import plan_sections
from attngap.report.sections.receipts import HELD_OUT, SAME, by_length, filled, fitted, measurements, which
from attngap.report.sections.speed import speed_section

Row = dict[str, Any]
SCALE = 3.0  # times the original's perplexity: what is worse is said and not drawn
MEASURES = {
    "perplexity_ratio": ("perplexity, times the original's", ".3f"),
    "divergence": ("KL to the original, nats per token", ".3f"),
    "state_error": ("squared error of the states, relative", ".3f"),
    "needle": ("digits of a hidden number recalled", ".0%"),
    "repetition": ("repeated random tokens predicted", ".0%"),
}
QUALITY = (
    Column("folder", "result"),
    Column("part", "model"),
    Column("text", "text", wide=True),
    Column("kept", "heads kept", ".1%"),
    Column("length", "tokens", ",.0f", "length of the text that these figures were measured on"),
    Column("perplexity", "perplexity", ",.2f"),
    Column("perplexity_ratio", "x original", ",.3f", "perplexity, as a multiple of the original's at the same length"),
    Column("divergence", "KL, nats", ".4f", "divergence from the original's predictions, per token"),
    Column("state_error", "error of states", ".4f", "squared error of an encoder's states, relative to the original's"),
    Column("needle", "needle", ".1%", "share of the digits of a hidden number that are recalled"),
    Column("repetition", "repetition", ".1%", "share of a repeated random sequence that is predicted"),
)


def conversion_sections(results: Results) -> list[Section]:
    given = results.of("receipt")
    receipts = sorted(given, key=lambda result: result.content["kept"] / result.content["heads"])
    found = []
    if receipts:
        found.append(_quality(receipts, given[0]))
        if any(receipt.content.get("speed") for receipt in receipts):
            found.append(speed_section(receipts, given[0]))
    return found + plan_sections(results)


def _quality(receipts: Sequence[Result], first: Result) -> Section:
    """Of `first`, the one that the page's headline is about, how it holds with length; of all, the figures."""
    rows = [
        {"folder": str(receipt.path.parent), "kept": _share(receipt, row["part"]), "text": text, **row}
        for receipt in receipts
        for text, found in measurements(receipt.content)
        for row in found
    ]
    blocks: list[Block] = []
    if chart := _against_length(first, which(first, receipts)):
        blocks.append(chart)
    if len(receipts) > 1 and (chart := _against_kept([row for row in rows if row["text"] == HELD_OUT])):
        blocks.append(chart)
    columns = [
        column for column in filled(QUALITY, rows) if column.key != "text" or len({row["text"] for row in rows}) > 1
    ]
    blocks.append(Table("quality-table", "Quality", columns, rows))
    if baselines := _baselines(receipts):
        title = "Beside baselines, on passages of the length that replacements were fitted at"
        blocks.append(Table("baselines-table", title, filled(QUALITY, baselines), baselines))
    if places := _places(receipts):
        blocks.append(Table("needle-table", "Needle recall by length and depth", _place_columns(places), places))
    if said := [note for receipt in receipts for note in receipt.content.get("notes") or []]:
        blocks.append(notes(said))
    return Section("quality-section", "What it costs", blocks)


def _baselines(receipts: Sequence[Result]) -> list[Row]:
    """Other passages than those by length, in a table of their own: only these have random heads beside them."""
    return [
        {"folder": str(receipt.path.parent), "kept": _share(receipt, row["part"]), **row}
        for receipt in receipts
        if receipt.content.get("by_length")
        for row in fitted(receipt.content)
    ]


def _against_length(receipt: Result, name: str) -> Chart | None:
    """The first picture of the page: does the conversion hold as the text grows? With its `name` if there are more."""
    measured, positions = by_length(receipt.content), receipt.content.get("positions")
    beyond = _off_scale(measured)
    rows = [row for row in measured if row["part"] not in beyond]
    specs = {}
    for key, (label, form) in MEASURES.items():
        points = [row | {"value": row[key]} for row in rows if row.get(key) is not None]
        points = [{name: point[name] for name in ("length", "part", "value")} for point in points]
        if points:
            specs[label] = charts.quality_against_length(points, label, form, positions).to_dict()
    if not specs:
        return None
    lengths = sorted({row["length"] for row in rows})
    if len(lengths) > 1:
        see = "A line that stays level holds at that length; the gap between the conversion and "
        see += '"without features" is what they and held tokens add to sinks and a window of the same room.'
    else:
        see = f"Measured at {lengths[0]:,} tokens only: it says nothing about longer text."
    if positions and lengths[-1] > positions:
        see += f" Right of the dashed line the text is longer than the model's own {positions:,} positions."
    for part, worst in beyond.items():
        see += f" Off this scale: {part}, with a perplexity up to {worst:,.0f} times the original's."
    alt = "Quality of the original, the conversion and its parts, against the length of the text"
    title = "Quality against length" if len(lengths) > 1 else f"Quality at {lengths[0]:,} tokens"
    title += f", {name}" if name else ""
    return Chart("quality", title, alt, next(iter(specs.values())), see, specs, "Measure")


def _off_scale(rows: Sequence[Row]) -> dict[str, float]:
    """Parts that would flatten all others, and their worst ratio: a conversion without its window may be of no use."""
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["part"]] = max(worst.get(row["part"], 0.0), row.get("perplexity_ratio") or 0.0)
    return {part: ratio for part, ratio in worst.items() if ratio > SCALE}


def _against_kept(rows: Sequence[Row]) -> Chart | None:
    """Several conversions of one model: every line ends at the original, where all heads keep softmax."""
    specs = {}
    for key, (label, _) in MEASURES.items():
        known = [row | {"value": row[key]} for row in rows if row.get(key) is not None]
        length = max((row["length"] for row in known), default=0)
        known = [row for row in known if row["length"] == length]
        ends = [row["value"] for row in known if row["part"] == "original"]
        others = [row for row in known if row["part"] != "original"]
        if not others or not ends:
            continue
        points = [{name: row[name] for name in ("kept", "part", "value")} for row in others]
        parts = dict.fromkeys(row["part"] for row in others)
        points += [{"kept": 1.0, "part": part, "value": ends[0]} for part in parts]
        specs[f"{label}, {length:,} tokens"] = charts.quality_against_kept(points, label).to_dict()
    if not specs:
        return None
    alt = "Quality against the share of heads that keep softmax, for the conversions and their baselines"
    caption = "The lower the line, the less is lost at that share. Dots are measured; dashes only join them."
    first = next(iter(specs.values()))
    return Chart("quality-kept", "Quality against share kept", alt, first, caption, specs, "Measure")


def _places(receipts: Sequence[Result]) -> list[Row]:
    """One row per place, one column per model; of the first receipt that has them."""
    for receipt in receipts:
        quality = receipt.content["quality"]
        if places := quality.get("original", {}).get("needle_by_place"):  # none in what was not measured
            return [
                {"length": int(place.split("@")[0]), "depth": float(place.split("@")[1])}
                | {
                    SAME.get(name) or name: values.get("needle_by_place", {}).get(place)
                    for name, values in quality.items()
                }
                for place in places
            ]
    return []


def _place_columns(rows: list[Row]) -> list[Column]:
    where = [Column("length", "tokens", ",.0f"), Column("depth", "depth", ".0%", "0% is the start of the text")]
    return where + [Column(name, name, ".0%") for name in rows[0] if name not in ("length", "depth")]


def _share(receipt: Result, part: str) -> float:
    return 1.0 if part == "original" else receipt.content["kept"] / receipt.content["heads"]
