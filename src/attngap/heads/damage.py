"""Damage of replacing one head, estimated for every head at once from a few backward passes (docs/theory.md 5.1).

To second order a change d of the model's output distribution costs d^T F d / 2 nats, F the Fisher matrix. With labels
drawn from the model itself, and g the gradient of their log-probability, F = E[g g^T]: so the cost of changing a head's
output by Delta o is E[(g . Delta o)^2] / 2, and one backward pass gives g at every head.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.heads.chain import run_chain
from attngap.models.capture import Call, capture, single

ROWS = 128  # whose probabilities are summed at once: sums of all of them would be a second copy of the logits
# Nats per token and draw that a token counts for at most. Second order ends about where the divergence reaches the
# entropy of a prediction, some nats; without the cap single tokens decided the damage of a head.
CAP = 3.0
# Tokens within which the errors of one head are added up before they are squared: they move the same later predictions.
# Token by token, sums over all heads were 0.7 of the real ones on text and 0.3 where a sequence repeats; a longer span
# adds hardly anything and is noisier.
SPAN = 64
Change = Callable[[Call], Tensor | None]  # (..., h, t, dv): what replacements would add to the output of the call
Directions = Callable[[Tensor, torch.Generator], Iterator[Tensor]]  # random cotangents of an output


def projections(
    model: PreTrainedModel,
    read: Callable[[], Tensor],
    change: Change,
    directions: Directions,
    generator: torch.Generator,
    observe: Callable[[int, Float[Tensor, "draws h t dv"]], None] | None = None,
) -> dict[int, Float[Tensor, "draws ... h t"]]:
    """g_h . Delta o_h of every layer, head and token, one draw for each of the `directions` of the output.

    `read` runs the model once and returns the output that is differentiated. A layer whose change is None is left out.
    `observe(layer, g)` is shown the gradients of all draws. Where the model's layers are a chain, one layer at a time
    is differentiated and nothing but the states between them is kept; the numbers are the same.
    """
    with frozen(model), torch.enable_grad():
        chain = run_chain(model, lambda: single(read()))  # labels are drawn by sums over the vocabulary
        if chain is None:
            return _all_at_once(model, read, change, directions, generator, observe)
        last, places = chain.states[-1], range(len(chain.layers))
        pulled = [
            torch.autograd.grad(chain.output, last, direction, retain_graph=True)[0]
            for direction in directions(chain.output.detach(), generator)
        ]
        chain = chain.without_output()
        found: dict[int, Tensor] = {}
        for place in reversed(places):
            watched = _Watched(change, place)
            with capture(model, watched):
                before, after = chain.again(place)
            wanted = [before, *watched.leaves.values()]
            grads = [torch.autograd.grad(after, wanted, each, retain_graph=True) for each in pulled]
            pulled = [state for state, *_ in grads]
            if watched.leaves:
                gradients = torch.stack([leaf[0] for _, leaf in grads])
                found[place] = torch.stack([(g * watched.changes[place]).sum(-1) for g in gradients])
                if observe is not None:
                    observe(place, gradients)
    return {layer: found[layer] for layer in sorted(found)}


class _Watched:
    """Notes what replacements would change and adds zeros that a gradient is wanted for."""

    def __init__(self, change: Change, layer: int | None = None):
        self.change, self.layer = change, layer
        self.changes: dict[int, Tensor] = {}
        self.leaves: dict[int, Tensor] = {}

    def __call__(self, call: Call) -> Tensor | None:
        if self.layer is not None:
            call = dataclasses.replace(call, layer=self.layer)
        found = None if call.cross else self.change(call)
        if found is None:
            return None
        self.changes[call.layer] = found.detach()
        self.leaves[call.layer] = torch.zeros_like(call.output, requires_grad=True)
        return call.output + self.leaves[call.layer]


def _all_at_once(model, read, change, directions, generator, observe) -> dict[int, Float[Tensor, "draws ... h t"]]:
    """Of a model whose layers are no chain: one graph through all of them."""
    watched = _Watched(change)
    with capture(model, watched):
        output = single(read())
        draws = [
            torch.autograd.grad(output, list(watched.leaves.values()), direction, retain_graph=True)
            for direction in directions(output.detach(), generator)
        ]
    found = {}
    for layer, grads in zip(watched.leaves, zip(*draws, strict=True), strict=True):
        gradients = torch.stack([each[0] for each in grads])
        found[layer] = torch.stack([(g * watched.changes[layer]).sum(-1) for g in gradients])
        if observe is not None:
            observe(layer, gradients)
    return found


def score(projected: Float[Tensor, "draws *what h t"], *, is_language_model: bool) -> Float[Tensor, "*what h"]:
    """Estimated damage: of a language model the KL divergence in nats per token, else the squared change of the output.

    Changes at different tokens move the same predictions, so their projections add up before they are squared. All of
    them together would be one number per draw; pairs of tokens less than SPAN apart, weighted by 1 - distance / SPAN,
    hold nearly all of it. On few tokens the change of a head is far beyond second order; a square of many nats there is
    no estimate any more, so a token counts for at most CAP.
    """
    if is_language_model:
        limit = math.sqrt(2 * CAP)
        return (_nearby_products(projected.clamp(-limit, limit), SPAN) / 2 / projected.shape[-1]).mean(0)
    return projected.sum(-1).square().mean(0)


def _nearby_products(x: Float[Tensor, "... t"], span: int) -> Float[Tensor, "..."]:
    """Sum of x_s x_t (1 - |s - t| / span) over pairs with |s - t| < span: of squared sums over windows, so >= 0."""
    running = torch.nn.functional.pad(x.double(), (span, span - 1)).cumsum(-1)
    return ((running[..., span:] - running[..., :-span]).square().sum(-1) / span).to(x.dtype)


def label_directions(
    logits: Float[Tensor, "b t n"], generator: torch.Generator, draws: int = 1
) -> Iterator[Float[Tensor, "b t n"]]:
    """Gradients of log p(label) in the logits, for labels drawn from the model: one at the label, minus p."""
    cotangent = logits.softmax(-1)
    labels = draw_labels(cotangent, draws, generator)
    cotangent.neg_()
    one = torch.ones_like(labels[..., :1], dtype=cotangent.dtype)
    before: Tensor | None = None
    for label in labels.split(1, -1):
        if before is not None:
            cotangent.scatter_add_(-1, before, -one)
        before = label
        yield cotangent.scatter_add_(-1, label, one)  # the same memory each time: as large as all logits


def random_directions(
    output: Float[Tensor, "..."], generator: torch.Generator, draws: int = 1
) -> Iterator[Float[Tensor, "..."]]:
    """For an output without labels: then E[(g . Delta o)^2] is its squared change."""
    for _ in range(draws):
        yield torch.randn(output.shape, generator=generator).to(output)


def draw_labels(p: Float[Tensor, "b t n"], draws: int, generator: torch.Generator) -> Int[Tensor, "b t draws"]:
    """Independent labels from p by its cumulative sums: one random number per draw.

    torch.multinomial takes one for every label there is: a second for a thousand tokens of a vocabulary of 50,000.
    """
    heights = torch.rand(*p.shape[:-1], draws, generator=generator, dtype=p.dtype).to(p.device)
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
