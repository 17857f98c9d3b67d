"""Watch, or replace, what every attention call of a model reads and writes, through transformers' attention interface.

The model computes with its own SDPA function and SDPA masks, a converted one with its own replacements, so its outputs
are the same to the bit.
"""

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attngap.errors import AttngapError
from attngap.mechanisms.rotary import Angles
from attngap.models.angles import angles_of, note_angles
from attngap.models.masks import readable

NAME = "attngap_capture"
# What `attngap.models.swap` calls its attention function, and the child of a module that says which heads it replaces.
CONVERTED = "attngap"
# Arguments of the interface that change the mathematics and that SDPA does not compute.
UNSUPPORTED = ("softcap", "s_aux", "indices", "block_indices")
SUPPORTED = "plain, grouped-query, sliding-window, padded, position-biased and cross attention"
CROSS_INPUTS = ("key_value_states", "encoder_hidden_states")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the attention function. q and k carry their rotary embedding; k and v may have fewer heads."""

    layer: int  # counts calls, not modules: a shared module is a layer each time it is called
    module: nn.Module
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b kv s d"]
    v: Float[Tensor, "b kv s dv"]
    mask: Bool[Tensor, "#b #h t s"] | Float[Tensor, "#b #h t s"] | None  # True = may read; None with `causal` says all
    bias: Float[Tensor, "#b h t s"] | None  # added to the logits (T5)
    scale: float
    causal: bool  # a row reads itself and what comes before
    window: int | None  # the model's own sliding window, which `mask` already contains
    cross: bool
    output: Float[Tensor, "b h t dv"]
    rotary: Angles | None = None  # cos and sin that q and k were turned by, where the model hands them on
    linear: tuple[int, ...] = ()  # heads that a converted model has replaced already: what they do is in `output` only

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]


Observer = Callable[[Call], Tensor | None]


class _Watch:
    """The state of one capture: its observer and the number of calls since the forward pass began."""

    def __init__(self, observe: Observer, compute: Callable[..., tuple[Tensor, Any]]):
        self.observe = observe
        self.compute = compute  # the model's own attention
        self.calls = {False: 0, True: 0}  # self-attention, cross-attention
        self.cross: set[nn.Module] = set()

    def restart(self, *_: Any) -> None:
        self.calls = {False: 0, True: 0}


_WATCHED: weakref.WeakKeyDictionary[nn.Module, _Watch] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def capture(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Call `observe(call)` at every attention call inside; a tensor it returns, `(b, h, t, dv)`, replaces the output.

    >>> with capture(model, lambda call: print(call.layer, call.q.shape)):  # doctest: +SKIP
    ...     model(tokens)
    """
    _check(model)
    configs = attention_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    watch = _Watch(observe, AttentionInterface()[CONVERTED] if CONVERTED in before else sdpa_attention_forward)
    hooks = [model.register_forward_pre_hook(watch.restart), *_watch_cross(model, watch), *note_angles(model)]
    modules = list(model.modules())
    try:
        for module in modules:
            _WATCHED[module] = watch
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        for module in modules:
            _WATCHED.pop(module, None)
        for hook in hooks:
            hook.remove()


def _check(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if model in _WATCHED:
        raise AttngapError(f"This {kind} is being captured already; leave that capture first")
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            raise AttngapError(
                f"{type(part).__name__} does not use transformers' attention interface, so its heads cannot be seen. "
                f"Models that do: most decoders and encoders, such as Llama, Qwen, Mistral, GPT-2, BERT, T5"
            )
    if not model._supports_sdpa:
        raise AttngapError(
            f"{kind} has no SDPA attention: it changes the softmax in a way that is not handled (softcap or learned "
            f"sinks, as a rule). Handled: {SUPPORTED}"
        )


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Every distinct config that some module may read its attention implementation from."""
    found: dict[int, Any] = {}
    queue: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    while queue:
        config = queue.pop()
        if config is not None and id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            queue += [getattr(config, key) for key in config.sub_configs]
    return list(found.values())


def _watch_cross(model: PreTrainedModel, watch: _Watch) -> list[Any]:
    """Note, before a module runs, whether it is given another sequence to attend to."""
    hooks = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if not set(names) & set(CROSS_INPUTS):
            continue

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str] = names) -> None:
            given = dict(zip(names, args, strict=False)) | kwargs
            if any(given.get(name) is not None for name in CROSS_INPUTS):
                watch.cross.add(module)
            else:
                watch.cross.discard(module)

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    return hooks


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The interface's signature: the model's own function computes, the observer sees."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise AttngapError(f"{type(module).__name__} uses {name!r}, which is not handled. Handled: {SUPPORTED}")
    watch = _WATCHED[module]
    output, _ = watch.compute(module, query, key, value, attention_mask, **kwargs)  # (b, t, h, dv)
    cross = module in watch.cross
    layer = watch.calls[cross]
    watch.calls[cross] += 1
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    scale = kwargs.get("scaling")
    call = Call(
        layer=layer,
        module=module,
        q=query,
        k=key,
        v=value,
        mask=attention_mask,
        bias=kwargs.get("position_bias"),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=bool(causal) and not cross and query.shape[2] > 1,
        window=kwargs.get("sliding_window"),
        cross=cross,
        output=output.transpose(1, 2),
        rotary=None if cross else angles_of(module),
        linear=_linear(module, query.shape[1]),
    )
    replaced = watch.observe(call)
    return output if replaced is None else replaced.transpose(1, 2).contiguous(), None


def _linear(module: nn.Module, heads: int) -> tuple[int, ...]:
    mixed: Any = module._modules.get(CONVERTED)
    return () if mixed is None else tuple(sorted(set(range(heads)) - set(mixed.keep.tolist())))


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def allowed(call: Call, rows: slice) -> Bool[Tensor, "b h r s"] | None:
    """Which keys the rows may read, `(b or 1, h or 1, r, s)`; None when every row reads every key."""
    if call.mask is not None:
        return readable(call.mask[..., rows, :])
    if not call.causal:
        return None
    index = torch.arange(call.k.shape[2], device=call.k.device)
    here = torch.arange(call.q.shape[2], device=call.q.device)[rows]
    return (index[None, :] <= here[:, None])[None, None]
