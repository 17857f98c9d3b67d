"""What a diagnosis says: a row for every head, the damage curve, and where the numbers come from."""

from collections import Counter
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from attngap.charts.heads import VERDICTS
from attngap.charts.inline import Grid, head_squares, number
from attngap.diagnosis.prediction import Joint, Predictor
from attngap.errors import AttngapError, missing_extra
from attngap.heads.choice import ranked_units
from attngap.models.plan import ModelFacts, Plan, Point, Replacement
from attngap.options import GRANULARITY, KEEP, Granularity
from attngap.storage.files import write_atomically, write_text
from attngap.storage.records import read_record

SCHEMA = "attngap.diagnosis/1"
RESULT = "diagnosis.json"
SHOWN = 10  # heads in a notebook's table
Kind = Literal["retrieval", "duplicate", "previous", "sink", "local", "selective", "broad"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Read(_Strict):
    """One far pair of tokens that a head joins on the first passage, among its strongest."""

    at: int  # position of the query
    query: str
    key: str
    after: str  # the token after the key: what a copying head would predict
    distance: int
    weight: float


class Head(_Strict):
    """One head. Shares are fractions; `None` means not measured (--quick) or not defined. See docs/schema.md."""

    id: str
    layer: int
    head: int
    kv_head: int
    verdict: Literal["keep", "replace", "window", "linear"]
    reason: str
    kind: Kind = "broad"
    replaceable: bool = True
    # text, averaged over rows and passages
    entropy: float | None
    top: float
    sink: float
    near: float
    far: float
    kappa: float | None
    kappa_p10: float | None
    kappa_p90: float | None
    selecting: float | None
    on_sink: float
    n_star: float | None
    spread: float | None
    logit_ratio: float | None
    # the stress passage
    previous: float | None = None
    duplicate: float | None = None
    induction: float | None = None
    stress_far: float | None = None
    # certificates at the headline rank, and at every rank
    floor: float | None = None
    ceiling: float | None = None
    stress_floor: float | None = None
    stress_ceiling: float | None = None
    floors: list[float] | None = None
    ceilings: list[float] | None = None
    stress_floors: list[float] | None = None
    stress_ceilings: list[float] | None = None
    # certified as well, errors counted by what the model reads; half the weighted squared error per token
    weighted_floor: float | None = None
    stress_weighted_floor: float | None = None
    weighted_floors: list[float] | None = None
    stress_weighted_floors: list[float] | None = None
    far_weight: float | None = None
    spectrum: list[float] | None = None
    # replacements: relative squared output error
    errors: dict[str, float] | None = None
    fit: float | None = None
    stress_fit: float | None = None
    monotonicity: float | None = None
    # damage: nats per token on text and on the stress passage
    damage: float | None = None
    recall_damage: float | None = None  # measured for the worst heads, estimated for the others
    recall_estimate: float | None = None  # to second order, of those whose recall_damage was measured
    unavoidable: float | None = None
    recall_unavoidable: float | None = None
    lost: float | None = None
    recall_lost: float | None = None
    unavoidables: list[float] | None = None
    recall_unavoidables: list[float] | None = None
    importance: float | None = None
    measured: float | None = None
    recall_measured: float | None = None
    reads: list[Read] = []


class Verification(_Strict):
    """Real KL of replacing single heads, on passages that nothing else has seen."""

    heads: list[str]
    measured: list[float]
    estimated: list[float]
    spearman: float | None
    recall_spearman: float | None = None
    passages: int
    context: int


class Diagnosis(_Strict):
    """The result of `attngap.diagnose`; `diagnosis.json` holds exactly this."""

    schema_: Literal["attngap.diagnosis/1"] = Field(default=SCHEMA, alias="schema")
    model: ModelFacts
    options: dict[str, Any]
    rank: int | None  # the headline rank of `floor`, `ceiling` and `unavoidable`
    replacement: Replacement
    damage_unit: str | None
    heads: list[Head]
    cross: list[dict[str, float | int | None]] = []
    notes: list[str] = []
    verification: Verification | None = None
    joint: list[Joint] = []
    seconds: dict[str, float] = {}
    provenance: dict[str, Any]

    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="null")
    _pictures: dict[str, np.ndarray] | None = PrivateAttr(default=None)

    def with_pictures(self, pictures: dict[str, np.ndarray]) -> "Diagnosis":
        """Attach the heads' attention patterns, which `save` writes to `patterns.npz`."""
        self._pictures = pictures
        return self

    def to_pandas(self):
        """One row per head; lists become columns named after the rank."""
        try:
            import pandas as pd
        except ImportError:
            raise missing_extra("A table needs", "report") from None
        return pd.DataFrame([flat(head, self.options["ranks"]) for head in self.heads])

    def plot(self, color: str = "verdict"):
        """The layer x head map as an Altair chart; `color` is "verdict" or a number such as "damage" or "floor"."""
        from attngap.charts.heads import head_map

        return head_map([head.model_dump() for head in self.heads], color)

    def __repr_args__(self):
        """A line for people; `to_pandas` and `model_dump` have everything."""
        yield "model", self.model.name
        yield "heads", len(self.heads)
        yield from Counter(head.verdict for head in self.heads).items()
        yield "rank", self.rank

    def _repr_html_(self) -> str:
        """The map of verdicts and the heads that matter most, for a notebook."""
        worst = sorted(self.heads, key=lambda head: -(head.importance or 0.0))[:SHOWN]
        rows = [
            (h.id, h.verdict, number(h.damage, ".2g"), number(h.recall_damage, ".2g"), number(h.floor, ".1%"), h.reason)
            for h in worst
        ]
        header = ("head", "verdict", "damage on text", "on recall", f"floor at rank {self.rank}", "reason")
        table = Grid(f"The {len(rows)} heads that matter most of {len(self.heads)}", header, rows)
        places = [(head.layer, head.head, head.verdict) for head in self.heads]
        return f"<div><p><b>{escape(repr(self))}</b></p>{head_squares(places, VERDICTS)}{table.html()}</div>"

    def plan(self, keep: float = KEEP, granularity: Granularity = GRANULARITY) -> Plan:
        """Keep softmax on the share `keep` of heads (or key-head groups) whose loss would hurt most.

        Importance is a head's share of all damage on text plus its share of all damage on the stress passage: the two
        ask for different heads, and a plan must serve both. Heads that cannot be replaced stay on top of that.
        """
        if not 0 <= keep <= 1:
            raise AttngapError(f"keep must be a share from 0 to 1, got {keep}. For a tenth of the heads: 0.1")
        try:
            ordered = self._ranked(granularity)
            curve = self._curve(ordered)
        except AttngapError:
            raise
        except (LookupError, TypeError, ValueError, OverflowError) as error:  # numbers that no diagnosis has
            why = " ".join(str(error).split())[:120]
            raise AttngapError(f"This diagnosis is damaged ({why}). Diagnose the model again") from error
        count = round(keep * len(ordered))
        fixed = [(h.layer, h.head) for h in self.heads if not h.replaceable and h.verdict != "linear"]
        kept = [(h.layer, h.head) for unit in ordered[:count] for h in unit]
        return Plan(
            model=self.model,
            granularity=granularity,
            keep=tuple(sorted(fixed + kept)),
            replacement=self.replacement,
            curve=curve,
            provenance={"diagnosis": self.provenance},
        )

    def _ranked(self, granularity: Granularity) -> list[list[Head]]:
        """Replaceable heads, or groups of them, the most important first."""
        heads = {(head.layer, head.head): head for head in self.heads if head.replaceable}
        if any(head.importance is None for head in heads.values()):
            raise AttngapError(
                "This diagnosis has no damage estimate, so there is nothing to plan by. "
                "Run `attngap diagnose` without --quick"
            )
        size = self.model.heads // self.model.kv_heads if granularity == "group" else 1
        scores = {place: head.importance or 0.0 for place, head in heads.items()}
        units = ranked_units(scores, dict.fromkeys(range(self.model.layers), size))
        return [[heads[place] for place in unit] for unit in units]

    def _curve(self, ordered: list[list[Head]]) -> tuple[Point, ...]:
        """Predicted loss when the first 0, 1, 2, ... units keep softmax."""
        predict = Predictor(self.joint, int(self.options["context"]), int(self.options["passages"]))
        kept, text, recall = sum(map(len, ordered)), 0.0, 0.0
        points = [Point(kept=kept, text=0.0, recall=0.0, **predict(0.0, 0.0))]
        for unit in reversed(ordered):
            kept -= len(unit)
            text += sum(head.damage or 0.0 for head in unit)
            recall += sum(head.recall_damage or 0.0 for head in unit)
            points.append(Point(kept=kept, text=text, recall=recall, **predict(text, recall)))
        return tuple(points)

    def save(self, directory: str | Path) -> None:
        """Write `diagnosis.json` and the heads as `heads.parquet`, or `heads.csv` where pandas is not installed."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _write_table(self, directory)
        if (pictures := self._pictures) is not None:
            write_atomically(directory / "patterns.npz", lambda path: _write_npz(path, pictures))
        write_text(directory / RESULT, self.model_dump_json(by_alias=True, indent=1) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> "Diagnosis":
        path = Path(directory) / RESULT
        if not path.exists():
            raise AttngapError(f"No diagnosis in '{directory}'. Make one: attngap diagnose MODEL -o {directory}")
        return read_record(path, cls, what="diagnosis", schema=SCHEMA, hint="Diagnose the model again")


def flat(head: Head, ranks: list[int]) -> dict[str, Any]:
    """A head as one flat row: floors become floor_8, floor_16, ...; errors become error_elu, ..."""
    row: dict[str, Any] = {}
    for name, value in head.model_dump(exclude={"reads", "spectrum"}).items():
        if name == "errors":
            row |= {f"error_{key}": error for key, error in (value or {}).items()}
        elif name.endswith(("floors", "ceilings", "unavoidables")):
            row |= {f"{name[:-1]}_{rank}": item for rank, item in zip(ranks, value or [], strict=False)}
        else:
            row[name] = value
    return row


def _write_table(diagnosis: Diagnosis, directory: Path) -> None:
    try:
        table = diagnosis.to_pandas()
        import pyarrow  # noqa: F401 - pandas needs it for parquet
    except (AttngapError, ImportError):
        write_atomically(directory / "heads.csv", lambda path: _write_csv(diagnosis, path))
        return
    write_atomically(directory / "heads.parquet", table.to_parquet)


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:  # given a name, numpy would append .npz to it
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _write_csv(diagnosis: Diagnosis, path: Path) -> None:
    import csv

    rows = [flat(head, diagnosis.options["ranks"]) for head in diagnosis.heads]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
