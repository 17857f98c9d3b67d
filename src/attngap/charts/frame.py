"""What every chart shares: Altair loaded on first use, plain rows as data, colors that hold in light and dark."""

from collections.abc import Sequence
from typing import Any

from attngap.errors import AttngapError

Row = dict[str, Any]

# Okabe and Ito's palette, which most color-blind readers tell apart; each at least 3:1 on white and on near-black.
ORANGE, BLUE, TEAL, PURPLE, GRAY = "#d55e00", "#2a7fc0", "#00917a", "#b0578d", "#808892"
SERIES = (BLUE, ORANGE, TEAL, PURPLE, GRAY)


def altair():
    """The module, or one line that says what to install."""
    try:
        import altair
    except ImportError:
        raise AttngapError("Charts need an extra that is not installed. Next: pip install 'attngap[report]'") from None
    return altair


def rows(values: Sequence[Row], keys: Sequence[str] | None = None):
    """Rows as inline data, cut to `keys`; no row limit, since a page packs rows once and a notebook asked for them."""
    chosen = [{key: row.get(key) for key in keys} if keys else row for row in values]
    return altair().Data(values=chosen)
