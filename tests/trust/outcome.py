"""What a piece of the long run found."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass
class Outcome:
    """`counts` of what was tried by kind, the `worst` figure by kind, and every fault in a line."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)

    def count(self, kind: str, number: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + number

    def measure(self, kind: str, figure: float) -> None:
        """Keep the largest; what is not a number is larger than all."""
        before = self.worst.get(kind, 0.0)
        self.worst[kind] = max(before, math.inf if math.isnan(figure) else figure)

    def add(self, other: "Outcome") -> None:
        for kind, number in other.counts.items():
            self.count(kind, number)
        for kind, figure in other.worst.items():
            self.measure(kind, figure)
        self.faults += other.faults

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
