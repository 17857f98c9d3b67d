"""The divergence that a joint pass goes down."""

import torch
from torch.nn import functional as F

from attngap.conversion.joint import ROWS, divergence


def test_divergence_and_its_gradient_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, ROWS - 7, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    student, plain = student.float().requires_grad_(), student.clone().requires_grad_()
    found = divergence(student, teacher.float(), labels=True)
    expected = F.kl_div(
        plain.flatten(0, 1).log_softmax(-1),
        teacher.flatten(0, 1).log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    (3 * found).backward()
    (3 * expected).backward()
    torch.testing.assert_close(student.grad.double(), plain.grad, rtol=1e-4, atol=1e-7)
