"""What every chart shares: Altair loaded on first use, plain rows as data, colors that hold in light and dark."""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from attngap.errors import missing_extra

Row = dict[str, Any]
VEGA_LITE = "application/vnd.vegalite.v6+json"  # the kind of picture that Altair 6 writes

# Okabe and Ito's palette, which most color-blind readers tell apart; each at least 3:1 on white and on near-black.
ORANGE, BLUE, TEAL, PURPLE, GRAY = "#d55e00", "#2a7fc0", "#00917a", "#b0578d", "#808892"
GREEN = "#6a8f1f"
SERIES = (BLUE, ORANGE, TEAL, PURPLE, GRAY)


def altair():
    """The module, or one line that says what to install."""
    try:
        import altair
    except ImportError:
        raise missing_extra("Charts need", "report") from None
    return altair


@functools.cache
def chart_class():
    """Altair's Chart, which a notebook shows without a script from the net: as Vega-Lite if it draws that, else SVG."""

    class Chart(altair().Chart):
        def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
            import vl_convert

            spec = self.to_dict()
            shown = {VEGA_LITE: spec, "image/svg+xml": vl_convert.vegalite_to_svg(spec)}
            return shown | {"text/plain": repr(self)}

        def __repr__(self) -> str:
            return "attngap chart: .to_dict() has its Vega-Lite, .save(FILE) writes .svg, .png or .html"

    return Chart


def rows(values: Sequence[Row], keys: Sequence[str] | None = None):
    """Rows as inline data, cut to `keys`.

    As JSON text, because Altair checks and copies other rows value by value: 5,000 heads would take a minute.
    """
    chosen = [{key: _finite(row.get(key)) for key in keys or row} for row in values]
    return altair().Data(values=json.dumps(chosen), format={"type": "json"})


def _finite(value: Any) -> Any:
    """What was not measured is null; what is infinite cannot be drawn either."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
