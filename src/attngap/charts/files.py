"""Charts as files: pages that open offline, pictures, specifications."""

import json
from pathlib import Path
from typing import Any

from attngap.charts.frame import altair
from attngap.errors import AttngapError, missing_extra

SUFFIXES = (".html", ".png", ".svg", ".json")


def check_path(path: str | Path) -> Path:
    """Refuse a kind of file that `save` cannot write, before anything is computed; .json alone needs no extra."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise AttngapError(f"A chart is written as {', '.join(SUFFIXES)}; got {str(path)!r}")
    if path.suffix != ".json":
        altair()
        _converter()
    return path


def save(chart: Any, path: str | Path) -> Path:
    """Write a chart as .html (self-contained, works offline), .png, .svg or .json (its Vega-Lite specification)."""
    path = check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = chart.to_dict()
    if path.suffix == ".html":
        path.write_text(_converter().vegalite_to_html(spec, bundle=True), encoding="utf-8")
    elif path.suffix == ".png":
        path.write_bytes(_converter().vegalite_to_png(spec, ppi=144))
    elif path.suffix == ".svg":
        path.write_text(_converter().vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_text(json.dumps(spec), encoding="utf-8")
    return path


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError:
        raise missing_extra("Charts need", "report") from None
    return vl_convert
