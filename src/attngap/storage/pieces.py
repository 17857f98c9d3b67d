"""Finished pieces of a run by name, each a few tensors: wherever they are kept."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from attngap.errors import AttngapError


class Pieces(ABC):
    """What the stages of a run leave for one another."""

    @abstractmethod
    def get(self, name: str) -> dict[str, Tensor] | None:
        """The piece, or None when there is none."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the piece is there and whole."""

    @abstractmethod
    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Leave a piece, whole or not at all."""

    def require(self, name: str) -> dict[str, Tensor]:
        """A piece that an earlier stage of this run has left."""
        found = self.get(name)
        if found is None:
            raise AttngapError(f"The piece '{self.place(name)}' is gone. Run the same command again")
        return found

    def place(self, name: str) -> str:
        """Where a piece is, for people."""
        return name


class HeldPieces(Pieces):
    """In memory, for a worker that does not see the run's folder: what it was given, and what it has made."""

    def __init__(self, given: Mapping[str, Mapping[str, Tensor]]):
        self.given = given
        self.made: dict[str, dict[str, Tensor]] = {}

    def get(self, name: str) -> dict[str, Tensor] | None:
        found = self.made.get(name, self.given.get(name))
        return None if found is None else dict(found)

    def has(self, name: str) -> bool:
        return name in self.made or name in self.given

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.made[name] = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
