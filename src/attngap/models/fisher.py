"""What Fisher scores need of a model: labels drawn from its own predictions, and no gradients of its weights."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

ROWS = 128  # whose probabilities are summed at once: sums of all of them would be a second copy of the logits


def draw(p: Float[Tensor, "b t n"], draws: int, generator: torch.Generator) -> Int[Tensor, "b t draws"]:
    """Independent labels from p by its cumulative sums: one random number a draw.

    torch.multinomial takes one for every label there is: a second for a thousand tokens of a vocabulary of 50,000.
    """
    heights = torch.rand(*p.shape[:-1], draws, generator=generator, dtype=p.dtype)
    found = []
    for rows, height in zip(p.split(ROWS, 1), heights.split(ROWS, 1), strict=True):
        reached = rows.cumsum(-1)
        found.append(torch.searchsorted(reached, height * reached[..., -1:], right=True).clamp(max=p.shape[-1] - 1))
    return torch.cat(found, 1)


@contextlib.contextmanager
def frozen(model: nn.Module, but: Iterable[Tensor] = ()) -> Iterator[None]:
    """No gradient for the weights, `but` some: only activations are differentiated, at half the cost."""
    wanted = {id(p) for p in but}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
