"""The divergence that a joint pass goes down."""

import torch
from torch.nn import functional as F

from attngap.conversion.choose import convert
from attngap.conversion.joint import ROWS, Reference, divergence
from attngap.heads.replacement import build_replacement
from attngap.models.shapes import layer_shapes
from tests.conversion.small import plan
from tests.zoo import tiny


def test_divergence_and_its_gradient_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, ROWS - 7, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    student, plain = student.float().requires_grad_(), student.clone().requires_grad_()
    found = divergence(student, teacher.float(), is_language_model=True)
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


def test_a_reference_leaves_out_the_tokens_that_stay_exact_and_no_others():
    model = tiny()
    parts = {shape.layer: build_replacement(shape, plan(model).replacement, None)[0] for shape in layer_shapes(model)}
    converted = convert(model, parts, ())
    tokens = torch.arange(1, 41)[None]
    whole, late, later = (Reference(model, tokens, exact).divergence(converted) for exact in (0, 10, 11))
    torch.testing.assert_close(late * 30, whole * 40, rtol=1e-3, atol=1e-6)  # window 8 and 2 sinks: the same sum
    assert abs(later * 29 - whole * 40) > 1e-3 * whole * 40
    assert torch.equal(Reference(model, tokens, 40).divergence(converted), whole)  # nothing would be left: all count
