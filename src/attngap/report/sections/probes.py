"""Probe runs: where each mechanism stands on each task, against the size of its state."""

from typing import Any

from attngap.charts.probes import score_against_state
from attngap.probes.summary import Summary, summarize
from attngap.report.page import Block, Chart, Column, Section, Table, Text
from attngap.report.results import Results

COLUMNS = (
    Column("task", "task"),
    Column("mechanism", "mechanism"),
    Column("score", "score", ".3f", "mean over the seeds at the best learning rate by validation"),
    Column("half_width", "± 95%", ".3f", "half of Student's confidence interval over the seeds"),
    Column("closed", "closed", ".0%", "how far from chance (0%) to the best possible (100%)"),
    Column("predicted", "predicted", ".3f", "what theory predicts for a random memory of this state"),
    Column("state_floats", "state floats", ",.0f"),
    Column("parameters", "parameters", ",.0f"),
    Column("seeds", "seeds", ".0f"),
    Column("learning_rate", "learning rate", ".2g"),
    Column("metric", "metric"),
)


def probe_sections(results: Results) -> list[Section]:
    summaries = summarize(record for _, records in results.runs for record in records)
    if not summaries:
        return []
    blocks: list[Block] = []
    for task in dict.fromkeys(summary.task for summary in summaries):
        blocks.append(_chart(task, [summary for summary in summaries if summary.task == task]))
    blocks.append(Table("probes-table", "All probes", COLUMNS, [_row(summary) for summary in summaries]))
    blocks.append(
        Text(["Small models on small tasks: they show where a mechanism falls short, not how a large one does."])
    )
    tasks, mechanisms = (sorted({getattr(s, name) for s in summaries}) for name in ("task", "mechanism"))
    lead = f"Small models trained from scratch: {', '.join(mechanisms)} on {', '.join(tasks)}."
    return [Section("probes", "Probes", blocks, lead)]


def _chart(task: str, summaries: list[Summary]) -> Chart:
    points = [_row(summary) for summary in summaries if summary.mean is not None]
    for point in points:
        width = point["half_width"] or 0.0
        point |= {"low": point["score"] - width, "high": point["score"] + width}
    first = summaries[0]
    caption = f"Higher is better, further left is cheaper. Dotted lines: chance {first.chance:.3g}"
    caption += f" and the best possible {first.best:.3g}." if first.best is not None else "."
    if any(summary.predicted is not None for summary in summaries):
        caption += " Gray: the limit predicted for a random memory of that size (an empirical law)."
    spec = score_against_state(points, first.metric, first.chance, first.best).to_dict()
    alt = f"Score of each mechanism on {task} against the size of its state"
    return Chart(f"probe-{task}", f"{task}: {first.metric} against state size", alt, spec, caption)


def _row(summary: Summary) -> dict[str, Any]:
    return {
        "task": summary.task,
        "mechanism": summary.mechanism,
        "score": summary.mean,
        "half_width": summary.half_width,
        "closed": summary.closed,
        "predicted": summary.predicted,
        "state_floats": summary.state_floats,
        "parameters": summary.parameters,
        "seeds": len(summary.scores),
        "learning_rate": summary.learning_rate,
        "metric": summary.metric,
    }
