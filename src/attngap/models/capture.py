"""Watch, or replace, what every attention call of a model reads and writes, through transformers' attention interface.

The model computes with its own SDPA function and SDPA masks, a converted one with its own replacements, so its outputs
are the same to the bit.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from attngap.errors import AttngapError
from attngap.mechanisms.rotary import Angles
from attngap.models.angles import angles_of, note_angles
from attngap.models.compat import (
    attention_of,
    computes_by_sdpa,
    sdpa_attention_forward,
    sdpa_mask,
    set_attention,
    sub_configs,
    uses_interface,
)
from attngap.models.masks import FORBIDS, readable
from attngap.models.products import QUICK

NAME = "attngap_capture"
# What `attngap.models.swap` calls its attention function, and the child of a module that says which heads it replaces.
CONVERTED = "attngap"
# Arguments of the interface that change the mathematics and that SDPA does not compute.
UNSUPPORTED = ("softcap", "s_aux", "indices", "block_indices")
SUPPORTED = "plain, grouped-query, sliding-window, padded, position-biased and cross attention"
CROSS_INPUTS = ("key_value_states", "encoder_hidden_states")
CHECKED_ROWS = 4  # of each module, once: does what was captured give what the module computed?
CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}  # relative error that rounding explains; of other dtypes the next
CLOSE_HALF = 0.05


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the attention function. q and k carry their rotary embedding; k and v may have fewer heads.

    Tensors are in single precision at least, whatever the model computes in: sums and fits of half precision are none.
    """

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
    source: Tensor | None = None  # the keys as the model holds them: layers that share theirs share this memory
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

    def __init__(self, model: PreTrainedModel, observe: Observer, compute: Callable[..., tuple[Tensor, Any]]):
        self.kind = type(model).__name__
        self.observe = observe
        self.compute = compute  # the model's own attention
        self.thread = threading.get_ident()  # passes of other threads are computed and not seen
        self.calls = {False: 0, True: 0}  # self-attention, cross-attention
        self.cross: set[nn.Module] = set()

    def here(self) -> bool:
        return threading.get_ident() == self.thread

    def restart(self, *_: Any) -> None:
        if self.here():
            self.calls = {False: 0, True: 0}


_WATCHED: weakref.WeakKeyDictionary[nn.Module, _Watch] = weakref.WeakKeyDictionary()
# Modules whose captured tensors gave their output, and the length they did so at: a few tokens may not show it.
_EXPLAINED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@contextlib.contextmanager
def capture(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Call `observe(call)` at every attention call inside; a tensor it returns, `(b, h, t, dv)`, replaces the output.

    Once for each module it is checked that the captured tensors give the module's output; a model of which they do not
    is refused. Only passes of the thread that captures are seen, and a model is captured once at a time.

    >>> with capture(model, lambda call: print(call.layer, call.q.shape)):  # doctest: +SKIP
    ...     model(tokens)
    """
    check_watchable(model)
    before = {attention_of(config) for config in attention_configs(model)}
    watch = _Watch(model, observe, AttentionInterface()[CONVERTED] if CONVERTED in before else sdpa_attention_forward)
    modules = list(model.modules())
    with _LOCK:
        if any(module in _WATCHED for module in modules):
            raise AttngapError(f"This {watch.kind} is being captured already; leave that capture first")
        for module in modules:
            _WATCHED[module] = watch
    hooks: list[Any] = []
    restore: list[tuple[nn.Module, str, PretrainedConfig]] = []
    try:
        hooks += [
            model.register_forward_pre_hook(watch.restart),
            *_watch_cross(model, watch),
            *note_angles(model.modules()),
        ]
        _redirect(modules, restore)
        yield
    finally:
        for module, name, config in restore:
            setattr(module, name, config)
        for hook in hooks:
            hook.remove()
        with _LOCK:
            for module in modules:
                _WATCHED.pop(module, None)


def _redirect(modules: list[nn.Module], restore: list[tuple[nn.Module, str, PretrainedConfig]]) -> None:
    """Give the modules copies of their configs that name the capture: another model may share the originals."""
    copies: dict[int, PretrainedConfig] = {}
    for module in modules:
        for name, config in list(vars(module).items()):
            if isinstance(config, PretrainedConfig):
                restore.append((module, name, config))
                setattr(module, name, _redirected(config, copies))


def _redirected(config: PretrainedConfig, copies: dict[int, PretrainedConfig]) -> PretrainedConfig:
    if id(config) not in copies:
        found = copies[id(config)] = copy.copy(config)
        for key, inner in sub_configs(config).items():
            setattr(found, key, _redirected(inner, copies))
        set_attention(found, NAME)
    return copies[id(config)]


def check_watchable(model: Any) -> None:
    """Refuse, in a line, what is no model of transformers or computes its attention in a way that cannot be seen."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise AttngapError(
            f"A {kind} is not a model of transformers. Give the model itself; adapters of peft are put into its "
            "weights by merge_and_unload()"
        )
    attention = [part for part in model.modules() if "attention" in type(part).__name__.lower()]
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not uses_interface(part):
            raise AttngapError(
                f"{type(part).__name__} does not use transformers' attention interface, so its heads cannot be seen. "
                f"Models that do: most decoders and encoders, such as Llama, Qwen, Mistral, GPT-2, BERT, T5"
            )
    if not computes_by_sdpa(model):
        if not attention:
            raise AttngapError(f"{kind} has no softmax attention: there is no head to look at or to replace")
        raise AttngapError(
            f"{kind} has no SDPA attention: it changes the softmax in a way that is not handled (softcap or learned "
            f"sinks, as a rule). Handled: {SUPPORTED}"
        )


def attention_configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Every distinct config that some module may read its attention implementation from."""
    found: dict[int, PretrainedConfig] = {}
    queue = [value for part in model.modules() for value in vars(part).values() if isinstance(value, PretrainedConfig)]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue += [each for each in sub_configs(config).values() if isinstance(each, PretrainedConfig)]
    return list(found.values())


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    """What `forward` takes. A model is watched hundreds of times: asking every module anew takes seconds of them."""
    own = vars(module).get("forward")
    if own is None or isinstance(own, QUICK):  # which takes what the class takes
        return _names_of_class(type(module))
    return tuple(inspect.signature(module.forward).parameters)


@functools.cache
def _names_of_class(kind: type[nn.Module]) -> tuple[str, ...]:
    forward = inspect.getattr_static(kind, "forward")
    names = tuple(inspect.signature(kind.forward).parameters)
    return names if isinstance(forward, staticmethod | classmethod) else names[1:]


def _watch_cross(model: PreTrainedModel, watch: _Watch) -> list[Any]:
    """Note, before a module runs, whether it is given another sequence to attend to."""
    hooks = []
    for module in model.modules():
        names = _parameter_names(module)
        if not set(names) & set(CROSS_INPUTS):
            continue

        def note(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...] = names
        ) -> None:
            given = dict(zip(names, args, strict=False)) | kwargs
            if not watch.here():
                return
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
    watch = _WATCHED.get(module)
    if watch is None or not watch.here():  # another thread's pass, or one that outlived the capture
        compute = AttentionInterface()[CONVERTED] if CONVERTED in module._modules else sdpa_attention_forward
        return compute(module, query, key, value, attention_mask, **kwargs)[0], None
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise AttngapError(f"{type(module).__name__} uses {name!r}, which is not handled. Handled: {SUPPORTED}")
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
        q=single(query),
        k=single(key),
        v=single(value),
        mask=attention_mask,
        bias=kwargs.get("position_bias"),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=bool(causal) and not cross and query.shape[2] > 1,
        window=kwargs.get("sliding_window"),
        cross=cross,
        output=single(output.transpose(1, 2)),
        rotary=None if cross else angles_of(module),
        source=key,
        linear=_linear(module, query.shape[1]),
    )
    _explain(call, watch.kind, query.dtype)
    replaced = watch.observe(call)
    return output if replaced is None else replaced.transpose(1, 2).contiguous().to(output.dtype), None


def single(x: Tensor) -> Tensor:
    """In single precision, where it is in half: sums and fits of half precision are none."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _explain(call: Call, kind: str, dtype: torch.dtype) -> None:
    """Refuse a module whose output is not the softmax of what was captured: every number about it would be wrong."""
    length = call.q.shape[2]
    # Dropout explains a difference, and tensors without numbers have none.
    if length < 2 * _EXPLAINED.get(call.module, 0) or call.module.training or call.q.is_meta:
        return
    mask = call.mask
    biased = mask is not None and mask.dtype != torch.bool and bool(((mask > FORBIDS) & (mask != 0)).any())
    error = unexplained(call)
    if biased or error > CLOSE.get(dtype, CLOSE_HALF):
        why = "adds numbers of its own to them" if biased else f"is off by {error:.1%}"
        raise AttngapError(
            f"{type(call.module).__name__} of {kind} computes something else than softmax over its queries and keys: "
            f"layer {call.layer} {why}. Handled: {SUPPORTED}"
        )
    _EXPLAINED[call.module] = max(length, 1)


@torch.no_grad()
def unexplained(call: Call) -> float:
    """How far softmax attention over the captured tensors is from the output, relative to it, in a few rows."""
    t, heads = call.q.shape[2], [head for head in range(call.heads) if head not in call.linear]
    if not heads or not t:
        return 0.0
    worst = 0.0
    for place in sorted({int(x) for x in torch.linspace(0, t - 1, CHECKED_ROWS)}):
        rows = slice(place, place + 1)
        q, k, v = call.q[:1, heads, rows].float(), call.k[:1].float(), call.v[:1].float()
        group = call.heads // call.kv_heads
        k, v = (x.repeat_interleave(group, 1)[:, heads] for x in (k, v))
        logits = q @ k.mT * call.scale
        if call.bias is not None:
            bias = call.bias.expand(call.bias.shape[0], call.heads, -1, -1)
            logits = logits + bias[:1, heads, rows].float()
        may = _may_read(call, rows)
        if may is not None:
            if not bool(may.any()):
                continue
            logits = logits.masked_fill(~may, -torch.inf)
        found, exact = logits.softmax(-1) @ v, call.output[:1, heads, rows].float()
        worst = max(worst, float((found - exact).norm() / exact.norm().clamp(min=1e-12)))
    return worst


def _may_read(call: Call, rows: slice) -> Bool[Tensor, "1 1 r s"] | None:
    """As everything that reads a call takes it: one mask for all heads, with no numbers but for yes and no."""
    if call.mask is None or call.mask.dtype == torch.bool:
        may = allowed(call, rows)
    else:
        may = call.mask[..., rows, :] > FORBIDS
    return None if may is None else may[:1, :1]


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
