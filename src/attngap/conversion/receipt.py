"""The receipt of a conversion: what was kept, what it costs in quality, what it gains, and where it falls short."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attngap.conversion import receipt_view
from attngap.conversion.quality import Quality
from attngap.conversion.speed import Speed
from attngap.errors import AttngapError

SCHEMA = "attngap.receipt/1"
FILE = "receipt.json"
ORIGINAL, CONVERTED, WINDOW, RANDOM = "original", "converted", "sinks + window only", "random heads"


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
    options: dict[str, Any]
    quality: dict[str, Quality]
    speed: dict[str, list[Speed]] = {}
    fit_error: dict[str, float] = {}  # median and worst over the replaced heads, held out
    joint: dict[str, float] = {}  # held-out divergence before and after the joint pass
    seconds: dict[str, float] = {}
    notes: list[str] = []
    provenance: dict[str, Any] = {}

    def save(self, directory: str | Path) -> None:
        (Path(directory) / FILE).write_text(self.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> "Receipt":
        path = Path(directory) / FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise AttngapError(f"No receipt in '{directory}': {error}. Write one: attngap eval {directory}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise AttngapError(f"The receipt '{path}' is wrong at {place!r}: {first['msg']}") from error

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
            yield "perplexity_ratio", ours.perplexity_ratio
            yield "divergence", ours.divergence

    def shortcomings(self) -> list[str]:
        """Where the conversion is not clearly better than a baseline; said, never hidden."""
        ours, found = self.quality[CONVERTED], []
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
