"""What a task is: sequences generated from a seed, what is asked of them, and the scores that bound any answer."""

import dataclasses
import hashlib
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.errors import AttngapError, unknown

Split = Literal["train", "validation", "test"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences and the questions put to them: predict `targets[:, i]` from the output at position `where[:, i]`."""

    inputs: Int[Tensor, "b t"] | Float[Tensor, "b t f"]
    where: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"] | Float[Tensor, "b s"]

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def __getitem__(self, rows: slice) -> "Batch":
        return Batch(self.inputs[rows], self.where[rows], self.targets[rows])

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.inputs.to(device), self.where.to(device), self.targets.to(device))


@dataclasses.dataclass(frozen=True)
class Task:
    """A task is a frozen dataclass whose fields are its sizes. Subclasses state what is known about it.

    `higher` says whether a larger score is better; `chance` is what an answer that ignores the question scores;
    `best` is what the oracle scores in expectation, None where nobody knows it.
    """

    name: ClassVar[str]
    paper: ClassVar[str]  # arXiv id of the definition
    about: ClassVar[str]  # one line for `attngap probe list`
    metric: ClassVar[str]
    higher: ClassVar[bool] = True
    solved_at: ClassVar[float] = 0.95  # the share of the way from chance to best that counts as solved

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise AttngapError(f"{self.name}: {field.name} must be at least 1, got {value}")
        self.check()

    def check(self) -> None:
        """Refuse sizes that do not fit together."""

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are; None for real inputs."""
        raise NotImplementedError

    @property
    def features(self) -> int | None:
        """Width of a real input; None for tokens."""
        return None

    @property
    def outputs(self) -> int:
        """Width of the read-out: the number of classes, 1 for regression."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        raise NotImplementedError

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        """`count` fresh sequences. Only tasks on real data look at `split`; the others differ by their generator."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        raise NotImplementedError

    @property
    def best(self) -> float | None:
        raise NotImplementedError

    def oracle(self, batch: Batch) -> Tensor:
        """(b, s): the best possible answers, computed from the inputs alone."""
        raise NotImplementedError

    def score(self, answers: Tensor, batch: Batch) -> float:
        """Share of right answers."""
        return (answers == batch.targets).double().mean().item()

    def grade(self, outputs: Float[Tensor, "b s o"], batch: Batch) -> float:
        """The score of a model's outputs."""
        return self.score(outputs.squeeze(-1) if self.outputs == 1 else outputs.argmax(-1), batch)

    def closed(self, score: float) -> float | None:
        """How far from chance (0) to best (1) a score is; None where the best is unknown."""
        return None if self.best is None else (score - self.chance) / (self.best - self.chance)

    def solved(self, score: float) -> bool:
        share = self.closed(score)
        return share is not None and share >= self.solved_at

    def capacity(self, rank: int, value_dim: int) -> float | None:
        """The predicted score from a state of rank x value_dim floats, where theory gives one."""
        return None

    @property
    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def need(self, fits: bool, message: str) -> None:
        if not fits:
            raise AttngapError(f"{self.name}: {message}")


class Regression(Task):
    """Real targets; the score is the mean squared error over the variance of the target: 1 for ignoring the input."""

    metric = "relative error"
    higher = False

    @property
    def vocabulary(self) -> None:
        return None

    @property
    def outputs(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return 1.0

    @property
    def variance(self) -> float:
        """E[target^2]; targets have mean zero."""
        raise NotImplementedError

    def score(self, answers: Tensor, batch: Batch) -> float:
        return (answers - batch.targets).double().square().mean().item() / self.variance


def stream(split: str, seed: int, index: int = 0) -> torch.Generator:
    """The random numbers of block `index` of one split: any block can be drawn again without drawing those before."""
    digest = hashlib.sha256(f"{split}/{seed}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def distinct(count: int, low: int, high: int, picks: int, generator: torch.Generator) -> Int[Tensor, "count picks"]:
    """Each row: `picks` different integers from low to high - 1, in random order.

    The first `picks` exchanges of a Fisher-Yates shuffle, all rows at once: it draws picks numbers a row and not
    high - low, and sorts nothing.
    """
    span = high - low
    uniform = torch.rand(picks, count, generator=generator, dtype=torch.float64)
    other = (uniform * torch.arange(span, span - picks, -1)[:, None]).long() + torch.arange(picks)[:, None]
    cards = torch.arange(low, high, dtype=torch.int32)[:, None].repeat(1, count)  # (span, count)
    for i, place in enumerate(other):
        drawn = cards.gather(0, place[None])
        cards.scatter_(0, place[None], cards[i : i + 1].clone())
        cards[i] = drawn[0]
    return cards[:picks].T.long()


def build(classes: tuple[type[Task], ...], name: str, options: dict[str, Any]) -> Task:
    """The task called `name`, with the closest name in the error when there is none."""
    known = {cls.name: cls for cls in classes}
    if name not in known:
        raise unknown("task", name, known, hint="List them: attngap probe list")
    fields = {field.name: field.type for field in dataclasses.fields(known[name])}
    for option, value in options.items():
        if option not in fields:
            raise unknown(f"option of task {name}", option, fields)
        kinds = {int: (int,), float: (int, float), str: (str,)}[fields[option]]  # type: ignore[index]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise AttngapError(f"{name}: {option} must be {kinds[-1].__name__}, got {value!r}")
    return known[name](**options)
