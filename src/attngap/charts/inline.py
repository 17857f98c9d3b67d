"""Small tables and pictures without a chart library: what results show of themselves in a notebook or a terminal."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

CELL, GAP = 10, 1  # pixels of a square of the map, and between squares
BAR, LABEL, LINE = 220, 150, 20  # pixels of the longest bar, of its name, and from one bar to the next
SENTENCE = 40  # characters from which a cell needs room to wrap
TEXT = 'font-family="sans-serif" font-size="12" fill="currentColor"'


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table of text: the first column names the row; columns of numbers stand to the right, words to the left."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> str:
        styles = [f"text-align: {side}" for side in self._sides()]
        for place in range(len(styles)):
            if any(len(row[place]) > SENTENCE for row in self.rows):
                styles[place] += "; min-width: 24em"  # or a narrow notebook puts a word on each line
        head = "".join(_cell("th", cell, style) for cell, style in zip(self.header, styles, strict=True))
        body = "".join(
            f"<tr>{''.join(_cell('td', cell, style) for cell, style in zip(row, styles, strict=True))}</tr>"
            for row in self.rows
        )
        table = f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>"
        return f'<div style="overflow-x: auto">{table}</div>'

    def rich(self) -> Any:
        """The same for a terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title)
        for name, side in zip(self.header, self._sides(), strict=True):
            table.add_column(name, justify=side, no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _sides(self) -> list[Literal["left", "right"]]:
        columns = [[row[place] for row in self.rows] for place in range(len(self.header))]
        numbers = [
            bool(place) and all(cell[:1] in "-+.0123456789" for cell in each) for place, each in enumerate(columns)
        ]
        return ["right" if each else "left" for each in numbers]


def _cell(tag: str, text: str, style: str) -> str:
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'


def number(value: float | None, form: str) -> str:
    """A dash stands for what was not measured."""
    return "-" if value is None else format(value, form)


def head_squares(heads: Iterable[tuple[int, int, str]], colors: Mapping[str, str]) -> str:
    """An SVG map of (layer, head, kind): layers across, heads down, one path for each kind and a legend."""
    places: dict[str, list[tuple[int, int]]] = {kind: [] for kind in colors}
    for layer, head, kind in heads:
        places[kind].append((layer, head))
    every = [place for group in places.values() for place in group]
    step = CELL + GAP
    wide = max((layer for layer, _ in every), default=0) * step + CELL
    tall = max((head for _, head in every), default=0) * step + CELL
    parts, x = [], 0
    for kind, group in places.items():
        if group:
            squares = "".join(f"M{layer * step} {head * step}h{CELL}v{CELL}h-{CELL}z" for layer, head in group)
            legend = f'<text x="{x + CELL + 4}" y="{tall + 20}" {TEXT}>{escape(kind)} {len(group)}</text>'
            mark = f'<rect x="{x}" y="{tall + 11}" width="{CELL}" height="{CELL}" fill="{colors[kind]}"/>'
            parts.append(f'<path d="{squares}" fill="{colors[kind]}"/>{mark}{legend}')
            x += 40 + 8 * len(f"{kind} {len(group)}")
    label = ", ".join(f"{len(group)} {kind}" for kind, group in places.items() if group)
    return _svg(max(wide, x), tall + 26, f"Heads, layers across: {label}", "".join(parts))


def bars(values: Mapping[str, float], form: str, color: str) -> str:
    """Horizontal bars in SVG, each with its name and its number."""
    longest = max(values.values(), default=0.0) or 1.0
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y, length = i * LINE, max(1.0, BAR * value / longest)
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end" {TEXT}>{escape(name)}</text>'
            f'<rect x="{LABEL}" y="{y + 3}" width="{length:.0f}" height="{LINE - 6}" fill="{color}"/>'
            f'<text x="{LABEL + length + 6:.0f}" y="{y + 14}" {TEXT}>{format(value, form)}</text>'
        )
    label = ", ".join(f"{name} {format(value, form)}" for name, value in values.items())
    return _svg(LABEL + BAR + 80, LINE * len(values), label, "".join(parts))


def _svg(width: int, height: int, label: str, content: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" {size}>{content}</svg>'
