"""One self-contained HTML page: sections of text, charts and tables; Vega inlined once; data packed once.

Text goes through Jinja's autoescape, so markup in a model's name, a passage or a path is shown and never run. A
content security policy forbids every request, so a page that opens is a page that needs nothing from outside.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, ClassVar

from attngap.errors import AttngapError, missing_extra

Row = dict[str, Any]
ROWS_SHOWN = 20  # rows written into the page; the others come from the packed data, a page of rows at a time
SCRIPTS = ("data.js", "charts.js", "tables.js", "matrix.js", "heads.js")


@dataclasses.dataclass(frozen=True)
class Text:
    """Paragraphs; `tone` is "plain", "note" (a caveat) or "pre" (output kept as printed)."""

    kind: ClassVar[str] = "text"
    paragraphs: Sequence[str]
    tone: str = "plain"


@dataclasses.dataclass(frozen=True)
class Fact:
    """A number people decide on, what it is, and what it was before."""

    value: str
    label: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    kind: ClassVar[str] = "facts"
    facts: Sequence[Fact]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A Vega-Lite spec with the sentence a person who cannot see it gets instead.

    `choices` are further specs of the same picture (other colors, other quantities) that a selector switches between.
    """

    kind: ClassVar[str] = "chart"
    id: str
    title: str
    alt: str
    spec: Row
    caption: str = ""
    choices: dict[str, Row] = dataclasses.field(default_factory=dict)
    choice_label: str = "Show"


@dataclasses.dataclass(frozen=True)
class Panels:
    """Small charts that stand side by side where there is room and one below the other on a phone.

    `key` explains what all of them draw: pairs of a swatch ("viridis", "solid", "dashed", "line", "band", "choice",
    "diamond", "dark", "pale") and its meaning. `wide` charts need half a page each, and a phone's whole width.
    """

    kind: ClassVar[str] = "panels"
    id: str
    title: str
    charts: Sequence[Chart]
    caption: str = ""
    key: Sequence[tuple[str, str]] = ()
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Column:
    key: str
    label: str
    form: str = ""  # a format spec such as ".3g" or ".1%"; empty for text and counts
    help: str = ""
    wide: bool = False  # sentences: never squeezed into a word a line

    def show(self, row: Row) -> str:
        return show(row.get(self.key), self.form)

    @property
    def numeric(self) -> bool:
        return bool(self.form)


@dataclasses.dataclass(frozen=True)
class Table:
    """Sortable, downloadable as CSV with full precision; `opens_head` makes each first cell a button."""

    kind: ClassVar[str] = "table"
    id: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    opens_head: bool = False

    @property
    def shown(self) -> Sequence[Row]:
        return self.rows[:ROWS_SHOWN]


@dataclasses.dataclass(frozen=True)
class PanelChart:
    """A chart of one head: its spec draws the data called `name`, which each head brings along."""

    name: str
    caption: str
    spec: Row


@dataclasses.dataclass(frozen=True)
class HeadPanel:
    """Where a click on a head opens: its numbers, its charts, its attention pattern, what it reads.

    A head is a row with `id`, `layer`, `head`, `place` (in the pictures), `words` (a sentence), `reads` (sentences),
    and rows, or values to be numbered from 1, under the name of each chart. A passage has `side` cells, each `cell`
    tokens wide, and a `caption`; `pictures` holds, passage by passage and head by head, square roots of weights in
    64 shades.
    """

    kind: ClassVar[str] = "head-panel"
    id: str
    map_id: str
    table_id: str
    heads: Sequence[Row]
    fields: Sequence[Column]
    charts: Sequence[PanelChart] = ()
    passages: Sequence[Row] = ()
    pictures: bytes = b""


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of a live page: "range" (low, high, step), "select" (choices) or "text"."""

    type: str
    name: str
    label: str
    value: Any
    low: int | float = 0
    high: int | float = 1
    step: int | float = 0.01
    choices: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """Inputs and the places a live page writes its answers to: facts (by name) and matrices (by name)."""

    kind: ClassVar[str] = "form"
    id: str
    inputs: Sequence[Input]
    facts: Sequence[tuple[str, str]] = ()
    matrices: Sequence[tuple[str, str]] = ()
    button: str = ""
    words: bool = False  # a line of tokens below the matrices
    columns: Sequence[str] = ()  # a stream of text each, side by side


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Texts by title; the first `common` letters are the same in all, and what follows is marked."""

    kind: ClassVar[str] = "side-by-side"
    texts: dict[str, str]
    common: int = 0


Block = Text | Facts | Chart | Panels | Table | HeadPanel | Form | SideBySide


@dataclasses.dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""


def show(value: Any, form: str = "") -> str:
    """A cell as a person reads it: a dash for what was not measured, yes and no for booleans."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if form and isinstance(value, int | float):
        return format(value, form)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def render(
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    answer: Sequence[str] = (),
    limit: str = "",
    facts: Sequence[Fact] = (),
    live: bool = False,
    scripts: Iterable[str] = (),
) -> str:
    """The page: `answer` in sentences, `limit` says up to where it holds.

    `live` allows requests to its own server (the explorer, whose `scripts` come last); a report makes none.
    """
    packed = Packer()
    for section in sections:
        for block in section.blocks:
            packed.add(block)
    code = [*(_asset(name) for name in SCRIPTS), *scripts, _asset("ready.js")]
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            subtitle=subtitle,
            answer=answer,
            limit=limit,
            facts=Facts(facts) if facts else None,
            sections=sections,
            live=live,
            style=_asset("page.css"),
            vega=_vega(),
            script="\n".join(code),
            packed=packed.encode(),
            pictures=_deflate(bytes(packed.pictures)),
        )
    )


class Packer:
    """Gathers specs and rows, each set of rows once however many charts draw it, into one deflated blob."""

    def __init__(self) -> None:
        self.charts: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.tables: dict[str, Any] = {}
        self.panels: dict[str, Any] = {}
        self.pictures = bytearray()

    def add(self, block: Block) -> None:
        if isinstance(block, Chart):
            choices = {name: self._spec(spec) for name, spec in block.choices.items()}
            self.charts[block.id] = {"spec": self._spec(block.spec), "choices": choices}
        elif isinstance(block, Panels):
            for chart in block.charts:
                self.add(chart)
        elif isinstance(block, Table):
            keys = [column.key for column in block.columns]
            self.tables[block.id] = {
                "columns": [dataclasses.asdict(column) for column in block.columns],
                "rows": _columnar([{key: row.get(key) for key in keys} for row in block.rows]),
                "shown": ROWS_SHOWN,
            }
        elif isinstance(block, HeadPanel):
            self.panels[block.id] = {
                "map": block.map_id,
                "table": block.table_id,
                "heads": _columnar(block.heads),
                "fields": [dataclasses.asdict(field) for field in block.fields],
                "charts": {chart.name: chart.spec for chart in block.charts},
                "passages": list(block.passages),
                "offset": len(self.pictures),
            }
            self.pictures += block.pictures

    def _spec(self, node: Any) -> Any:
        """The spec with its rows taken out: `{values: JSON text}` becomes `{name}`, equal rows under one name."""
        if isinstance(node, list):
            return [self._spec(item) for item in node]
        if not isinstance(node, dict):
            return node
        if isinstance(text := node.get("values"), str) and node.get("format") == {"type": "json"}:
            name = "rows-" + hashlib.sha256(text.encode()).hexdigest()[:12]
            self.data[name] = _columnar(json.loads(text))
            return {"name": name}
        return {key: self._spec(value) for key, value in node.items()}

    def encode(self) -> str:
        whole = {"charts": self.charts, "data": self.data, "tables": self.tables, "panels": self.panels}
        try:
            text = _compact(whole)
        except ValueError:  # JSON has no NaN and no infinity; most pages have none, and looking costs seconds
            text = _compact(_finite(whole))
        return _deflate(text.encode())


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _columnar(rows: Sequence[Row]) -> Row:
    """[{a: 1, b: 2}, ...] -> {keys: [a, b], columns: [[1, ...], [2, ...]]}: smaller, and deflates better."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {"keys": keys, "columns": [[row.get(key) for row in rows] for key in keys], "length": len(rows)}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """NaN is not measured (null), an infinity keeps its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@functools.cache
def _environment():
    try:
        import jinja2
    except ImportError:
        raise missing_extra("Reports need", "report") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attngap.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = show
    return environment


@functools.cache
def _asset(name: str) -> str:
    return files("attngap.report").joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script of 0.9 MB, from the installed vl-convert: no copy in this tree."""
    try:
        import altair
        import vl_convert
    except ImportError:
        raise missing_extra("Reports need", "report") from None
    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed; window.vega = vega;", vl_version=version)
    if "</script" in bundle.lower():
        raise AttngapError(
            "The installed vl-convert gives a script that cannot be inlined. Next: update vl-convert-python"
        )
    return bundle
