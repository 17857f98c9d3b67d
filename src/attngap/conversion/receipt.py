"""The receipt of a conversion: what was kept, what it costs in quality, what it gains, and where it falls short."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from attngap.conversion import receipt_view
from attngap.conversion.by_length import AtLength
from attngap.conversion.options import ConversionOptions, exact_tokens
from attngap.conversion.quality import Quality
from attngap.conversion.speed import Speed
from attngap.errors import AttngapError
from attngap.models.save import Conversion
from attngap.storage.files import write_text
from attngap.storage.records import read_record

SCHEMA = "attngap.receipt/1"
FILE = "receipt.json"
DEFAULT_CONTEXT: int = ConversionOptions.default("context")
ORIGINAL, CONVERTED, WINDOW, RANDOM = "original", "converted", "sinks + window only", "random heads"
WITHOUT = "without features"  # at each length: the same heads, sinks and window only
WITHOUT_HELD = "without held tokens"  # all of the room for the last tokens
WITHOUT_WINDOW = "without window"  # the same features, for the window's keys too


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured, by model; notes say what could not be."""

    quality: dict[str, Quality]
    speed: dict[str, list[Speed]]
    notes: list[str]
    by_length: list[AtLength] = dataclasses.field(default_factory=list)


class Entry(BaseModel):
    """A later measurement, on the text of this hash; what the conversion itself measured stays as it was."""

    model_config = ConfigDict(extra="forbid")
    time: str  # UTC, ISO
    text: str  # what was read, in words
    text_sha256: str
    quality: dict[str, Quality] = {}
    speed: dict[str, list[Speed]] = {}
    by_length: list[AtLength] = []
    notes: list[str] = []
    provenance: dict[str, Any] = {}


class Receipt(BaseModel):
    """Written as receipt.json beside the converted model."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: Literal["attngap.receipt/1"] = Field(default=SCHEMA, alias="schema")
    model: str
    mechanism: str
    heads: int
    kept: int
    groups: int  # key heads of the whole model
    kept_groups: int  # those whose full cache some kept head needs
    keep: list[tuple[int, int]]
    windows: dict[int, int] = {}  # by layer, where they are not the same in all
    options: dict[str, Any]
    quality: dict[str, Quality] = {}  # empty: not measured
    speed: dict[str, list[Speed]] = {}
    by_length: list[AtLength] = []  # quality at each length, every part of the conversion
    positions: int | None = None  # the model's own: nothing is claimed beyond them
    fit_error: dict[str, float] = {}  # median and worst over the replaced heads, held out
    joint: dict[str, float] = {}  # held-out divergence before and after the joint pass
    seconds: dict[str, float] = {}
    notes: list[str] = []
    provenance: dict[str, Any] = {}
    entries: list[Entry] = []  # measured later, by `attngap eval`, the oldest first

    def exact_tokens(self) -> str:
        """What replaced heads read exactly besides sinks, in words."""
        return exact_tokens(self.options, self.windows)

    def save(self, directory: str | Path) -> None:
        write_text(Path(directory) / FILE, self.model_dump_json(by_alias=True, indent=1) + "\n")

    def with_figures(
        self, figures: Figures, *, seconds: dict[str, float] | None = None, note: str | None = None
    ) -> "Receipt":
        """The receipt with what was measured, and where that falls short."""
        changes: dict[str, Any] = {"quality": figures.quality, "speed": figures.speed, "by_length": figures.by_length}
        found = self.model_copy(update=changes | ({} if seconds is None else {"seconds": dict(seconds)}))
        said = [] if note is None else [note]
        return found.model_copy(update={"notes": [*self.notes, *said, *figures.notes, *found.shortcomings()]})

    def with_entry(self, figures: Figures, *, text: str, text_sha256: str, made: dict[str, Any]) -> "Receipt":
        """The receipt with a later measurement beside what it holds."""
        found = Entry(
            time=made["time"],
            text=text,
            text_sha256=text_sha256,
            quality=figures.quality,
            speed=figures.speed,
            by_length=figures.by_length,
            notes=figures.notes,
            provenance=made,
        )
        return self.model_copy(update={"entries": [*self.entries, found]})

    @classmethod
    def load(cls, directory: str | Path) -> "Receipt":
        path = Path(directory) / FILE
        hint = f"Write one: attngap eval {directory}"
        if not path.exists():
            raise AttngapError(f"No receipt in '{directory}'. {hint}")
        return read_record(path, cls, what="receipt", schema=SCHEMA, hint=hint)

    def show(self) -> None:
        """Print quality beside original and baselines, speed and memory, and what to know about them."""
        receipt_view.show(self)

    def _repr_html_(self) -> str:
        return receipt_view.to_html(self)

    def __repr_args__(self):
        """A line for people; `model_dump` has everything."""
        yield "model", self.model
        yield "kept", f"{self.kept} of {self.heads} heads"
        ours = self.quality.get(CONVERTED)
        if ours is not None:
            if ours.perplexity_ratio is not None:
                yield "perplexity_ratio", round(ours.perplexity_ratio, 4)
            yield "divergence", round(ours.divergence, 4)

    def shortcomings(self) -> list[str]:
        """Where the conversion is not clearly better than a baseline; said, never hidden."""
        ours, found = self.quality.get(CONVERTED), []
        if ours is None:
            return []
        at = {(row.length, row.part): row for row in self.by_length}
        for (length, part), row in at.items():
            other = at.get((length, WITHOUT))
            if part != CONVERTED or other is None:
                continue
            if (other.divergence or 0) <= (row.divergence or 0):
                found.append(f"at {length:,} tokens the features lower the divergence no further than window and sinks")
            if (other.needle or 0) > (row.needle or 0):
                found.append(f"at {length:,} tokens sinks and window alone recall more ({other.needle:.0%})")
        for name in (WINDOW, RANDOM):
            other = self.quality.get(name)
            if other is None:
                continue
            if other.divergence <= ours.divergence:
                found.append(f"{name} diverges no more ({other.divergence:.4f} against {ours.divergence:.4f})")
            for label in ("induction", "needle"):
                a, b = getattr(ours, label), getattr(other, label)
                if a is not None and b is not None and b > a:
                    found.append(f"{name} has better {label} ({b:.1%} against {a:.1%})")
        return found


def unmeasured_receipt(conversion: Conversion) -> Receipt:
    """Of a converted model that was saved without a receipt: what its record tells."""
    facts, near = conversion.plan.model, conversion.plan.replacement
    group = facts.heads // facts.kv_heads
    kept = set(conversion.plan.keep)
    reach = next((each.options["reach"] for each in conversion.layers if each.options.get("reach")), None)
    return Receipt(
        model=facts.name,
        mechanism=near.feature_map,
        heads=facts.layers * facts.heads,
        kept=len(kept),
        groups=facts.layers * facts.kv_heads,
        kept_groups=len({(layer, head // group) for layer, head in kept}),
        keep=sorted(kept),
        options={"context": reach or DEFAULT_CONTEXT, "window": near.window, "sinks": near.sinks},
        provenance=conversion.provenance,
    )
