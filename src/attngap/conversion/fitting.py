"""Fit every layer's replacement to the layer's own outputs, each on its own, while the model runs once."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from attngap import engine
from attngap.errors import AttngapError
from attngap.heads.forward import body_of, forward
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import FitOptions, Seen, fit_layer
from attngap.models.capture import Call, capture
from attngap.storage.checkpoint import Checkpoint

SIDE_BY_SIDE = 4  # layers fitted at a time, at most: each holds its queries, keys and values
ON_RAY = 16  # layers sent to a cluster at a time

Streams = tuple[Seen, Sequence[Seen]]  # what a layer read and wrote, in passages of the context and in longer ones


class _AllFitted(Exception):
    """Leaves the forward pass: later layers have nothing to fit."""


def fit_all(
    model: PreTrainedModel,
    mechanisms: dict[int, Mechanism],
    tokens: Int[Tensor, "count context"],
    options: FitOptions,
    checkpoint: Checkpoint,
    advance: Callable[..., None],
    ray: str | None = None,
    *,
    longer: Callable[[int], Sequence[Seen]] | None = None,
    read: Callable[[Callable[[int, Seen], None]], None] | None = None,
) -> Float[Tensor, "layers h"]:
    """Fit the mechanisms in place; the held-out error of each head. Finished layers are kept in the checkpoint.

    All passages go through the model as one batch and layers are fitted where they are met: one pass, and the queries,
    keys and values of a few layers in memory. Fits are many small operations, which gain little from more threads than
    one; so as many layers as there are threads are fitted side by side, or `ON_RAY` of them on the cluster at `ray`.
    `longer` gives what a layer read and wrote in longer passages, to be fitted as well. `read` lets the model read the
    passages, to the end, and hands on what it meets; without it the pass ends with the last layer that is to be fitted.
    """
    at_a_time = _at_a_time() if ray is None else ON_RAY
    errors: dict[int, Tensor] = {}
    for layer, mechanism in mechanisms.items():
        done = checkpoint.get(f"layer-{layer}")
        if done is not None:
            errors[layer] = done.pop("error")
            mechanism.load_state_dict(done)
            advance()
    missing = set(mechanisms) - set(errors)
    waiting: dict[int, Streams] = {}

    def note(layer: int, seen: Seen) -> None:
        if layer not in missing:
            return
        q, k, v, out = (x.float() for x in seen[:4])
        waiting[layer] = Seen(q, k, v, out, seen.rotary), () if longer is None else longer(layer)
        if len(waiting) < min(at_a_time, len(missing)):
            return
        advance(0, note=f"layer {layer}")
        fitted = _fit(mechanisms, waiting, options) if ray is None else _fit_on(ray, mechanisms, waiting, options)
        for place, error in fitted.items():
            errors[place] = error
            checkpoint.put(f"layer-{place}", mechanisms[place].state_dict() | {"error": error})
            missing.remove(place)
            advance()
        waiting.clear()

    def watch(call: Call) -> None:
        if not call.cross:
            note(call.layer, Seen(call.q, call.k, call.v, call.output, call.rotary))
        if not missing:
            raise _AllFitted

    if missing and read is not None:
        read(note)
    elif missing:
        body = body_of(model)
        with torch.no_grad(), capture(body, watch), contextlib.suppress(_AllFitted):
            forward(body, tokens)
    return torch.stack([errors[layer] for layer in mechanisms])


def _at_a_time() -> int:
    return min(SIDE_BY_SIDE, torch.get_num_threads())


def _fit(
    mechanisms: Mapping[int, Mechanism], streams: Mapping[int, Streams], options: FitOptions
) -> dict[int, Float[Tensor, " h"]]:
    """Each layer in a thread of its own, with the same share of all threads however many there are: a share decides
    the order of sums, and a resumed run must repeat them to the bit."""
    threads = torch.get_num_threads()
    share = max(1, threads // _at_a_time())
    try:
        with ThreadPoolExecutor(len(streams), initializer=torch.set_num_threads, initargs=(share,)) as pool:
            fits = {layer: pool.submit(_fit_one, mechanisms[layer], each, options) for layer, each in streams.items()}
            return {layer: fit.result() for layer, fit in fits.items()}
    finally:
        torch.set_num_threads(threads)  # the share would be that of every thread begun from now on


def _fit_one(mechanism: Mechanism, streams: Streams, options: FitOptions) -> Float[Tensor, " h"]:
    (q, k, v, target, rotary), longer = streams
    return fit_layer(mechanism, q, k, v, target, options, rotary=rotary, longer=longer)


def _fit_on(
    ray: str, mechanisms: Mapping[int, Mechanism], streams: Mapping[int, Streams], options: FitOptions
) -> dict[int, Float[Tensor, " h"]]:
    """Each layer as a job on a Ray cluster."""
    layers, errors = list(streams), {}
    jobs = [(mechanisms[layer], streams[layer], options) for layer in layers]
    for outcome in engine.run(_job, jobs, ray=ray):
        layer = layers[outcome.index]
        if outcome.error is not None:
            raise AttngapError(f"Layer {layer} could not be fitted on the cluster: {outcome.error}")
        state, errors[layer] = outcome.value
        mechanisms[layer].load_state_dict(state)
    return errors


def _job(job: tuple[Mechanism, Streams, FitOptions]) -> tuple[dict[str, Tensor], Float[Tensor, " h"]]:
    mechanism, streams, options = job
    torch.set_num_threads(1)
    error = _fit_one(mechanism, streams, options)
    return mechanism.state_dict(), error
