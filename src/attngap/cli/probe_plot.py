"""`attngap probe results --plot`: one task's scores against the size of the state, as a picture."""

from pathlib import Path
from typing import Any

from attngap.errors import AttngapError, missing_extra


def plot(summaries: list[Any], path: Path) -> None:
    """Write an SVG. One point a mechanism and size, its interval over seeds, and the limit that theory predicts."""
    tasks = list(dict.fromkeys(summary.task for summary in summaries))
    if len(tasks) != 1:
        found = ", ".join(tasks) or "no runs"
        raise AttngapError(f"--plot draws one task, found {found}. Choose one: --task {tasks[0] if tasks else 'mqar'}")
    if path.suffix != ".svg":
        raise AttngapError(f"--plot writes SVG, got {str(path)!r}. Name it {path.with_suffix('.svg').name}")
    from attngap.charts.probes import score_against_state

    try:
        import vl_convert
    except ImportError:
        raise missing_extra("--plot needs", "report") from None
    first = summaries[0]
    points = [_point(summary) for summary in summaries if summary.mean is not None]
    chart = score_against_state(points, first.metric, first.chance, first.best)
    picture = chart.properties(width=560, height=300, background="white")
    path.write_text(vl_convert.vegalite_to_svg(picture.to_dict()), encoding="utf-8")


def _point(summary: Any) -> dict[str, Any]:
    width = summary.half_width or 0.0
    return {
        "mechanism": summary.mechanism,
        "state_floats": summary.state_floats,
        "score": summary.mean,
        "low": summary.mean - width,
        "high": summary.mean + width,
        "predicted": summary.predicted,
    }
