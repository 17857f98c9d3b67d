"""Checks of what links a head's error to the model's predictions."""

import torch

from attngap.theory.rank_bounds import ceiling
from attngap.theory.recurrences import causal_softmax
from attngap.theory.statements import Statement, require


def fisher_is_second_order() -> str:
    generator = torch.Generator().manual_seed(0)
    width, labels = 6, 9
    output, change = (torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden = torch.randn(width, width, generator=generator, dtype=torch.float64)
    reader = torch.randn(labels, width, generator=generator, dtype=torch.float64)

    def log_probabilities(x: torch.Tensor) -> torch.Tensor:
        return (reader @ (hidden @ x).tanh()).log_softmax(-1)

    before = log_probabilities(output)
    gradient = torch.autograd.functional.jacobian(log_probabilities, output)  # one row for each label
    gaps = []
    for size in (0.02, 0.01, 0.005):
        divergence = (before.exp() * (before - log_probabilities(output + size * change))).sum().item()
        fisher = 0.5 * (before.exp() * (gradient @ change * size).square()).sum().item()
        gaps.append(abs(divergence - fisher) / fisher)
    orders = [gaps[i] / gaps[i + 1] for i in range(2)]
    require(all(1.8 < order < 2.2 for order in orders), f"relative gaps {gaps} do not halve")
    return f"relative gap {gaps[0]:.3f}, {gaps[1]:.3f}, {gaps[2]:.3f} at changes of 0.02, 0.01, 0.005: it halves"


def outputs_within_the_ceiling() -> str:
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for rank in (1, 4, 8):
        weights = causal_softmax(32, 3.0, generator)
        value = torch.randn(32, 8, generator=generator, dtype=torch.float64)
        built = ceiling(weights, rank)
        assert built.weights is not None
        moved = ((weights - built.weights) @ value).square().sum().item()
        bound = built.value.item() * torch.linalg.matrix_norm(value, 2).square().item()
        largest = max(largest, moved / bound)
    require(largest <= 1, f"outputs moved by {largest} of the bound")
    return f"built weights at ranks 1, 4, 8 move the outputs by at most {largest:.2f} of the bound"


DAMAGE = (
    Statement("5.1", "half the Fisher form is the KL divergence up to third order", fisher_is_second_order),
    Statement("5.2", "outputs move by at most the ceiling times ||V||^2", outputs_within_the_ceiling),
)
