"""A verb rehearsed on a miniature: one key head and its queries, as wide as the model's, in two layers and in four.

What a diagnosis and a conversion do beside running the model is the same for every key head of every layer, and what
they do to logits is the same for every model of that vocabulary. So the difference of two miniatures is the cost of a
key head, what remains is the cost of all logits, and the tokens that went through the layers are counted. The real code
runs, with the options asked for: nothing here knows its stages.
"""

import contextlib
import dataclasses
import string
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attngap.conversion.linearize import linearize
from attngap.conversion.options import ConversionOptions
from attngap.costs.shape import ModelShape
from attngap.diagnosis.diagnose import diagnose
from attngap.diagnosis.options import DiagnosisOptions
from attngap.heads.passages import language_reference
from attngap.progress import progress

WIDTH = 16  # of the miniature's states for each head: its own products cost next to nothing
MULTIPLIER = "mlp"  # the part of a layer whose tokens are counted
LAYERS = (2, 4)  # of the two miniatures: both have heads to keep and heads to replace
HALF = 0.5
BRIEFLY: dict[str, dict[str, Any]] = {
    "diagnose": {"context": 64, "passages": 1, "ranks": (8,), "draws": 1},
    "linearize": {"context": 64, "tokens": 256, "length": 64, "steps": 1, "joint": 1, "rounds": 1},
}
FEW = 16  # tokens up to which a product takes as long as reading its weights


@dataclasses.dataclass
class Passes:
    """Tokens that went through one layer, and through the output layer."""

    forward: float = 0.0
    backward: float = 0.0
    reads: float = 0.0  # passes of so few tokens that reading the weights is what takes time
    head_forward: float = 0.0
    head_backward: float = 0.0
    head_reads: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """Seconds of one key head of one layer, seconds of what is done once, and what went through the model."""

    key_head: float
    once: float
    passes: Passes
    stages: dict[str, float]  # shares of the time, by stage


def rehearse_diagnosis(
    shape: ModelShape, options: DiagnosisOptions, *, dtype: torch.dtype, device: torch.device, text: str | None
) -> Rehearsal:
    def run(model: LlamaForCausalLM, words: Any, *, briefly: bool) -> dict[str, float]:
        chosen = options.but(verify=0, **BRIEFLY["diagnose"]) if briefly else options.but(verify=0)
        return diagnose(model, words, text, options=chosen).seconds

    return _rehearse(shape, run, "rehearsing the diagnosis", dtype, device)


def rehearse_conversion(
    shape: ModelShape, options: ConversionOptions, *, dtype: torch.dtype, device: torch.device, text: str | None
) -> Rehearsal:
    # A miniature has few groups of heads: of a tenth of them none would be left to look at.
    options = options.but(keep=HALF) if options.keep is not None else options

    def run(model: LlamaForCausalLM, words: Any, *, briefly: bool) -> dict[str, float]:
        chosen = options.but(**BRIEFLY["linearize"]) if briefly else options
        return linearize(model, words, None, text, options=chosen, measured=False)[1].seconds

    return _rehearse(shape, run, "rehearsing the conversion", dtype, device)


def _rehearse(
    shape: ModelShape, run: Callable[..., dict[str, float]], title: str, dtype: torch.dtype, device: torch.device
) -> Rehearsal:
    words, seconds, found, passes = letters(shape.vocabulary), [], {}, Passes()
    clock = time.process_time if torch.get_num_threads() == 1 and device.type == "cpu" else time.monotonic
    with progress(title, 1 + len(LAYERS), quiet=False) as advance:
        run(_placed(shape, 1, dtype, device), words, briefly=True)  # what is loaded and compiled once is not timed
        advance()
        for layers in LAYERS:
            model, passes = _placed(shape, layers, dtype, device), Passes()
            with counting(passes, shape.vocabulary, layers):
                start = clock()
                found = run(model, words, briefly=False)
                seconds.append(clock() - start)
            advance()
    few, many = LAYERS
    one = max(0.0, (seconds[1] - seconds[0]) / (many - few))
    whole = sum(found.values()) or 1.0
    return Rehearsal(one, max(0.0, seconds[0] - few * one), passes, {name: x / whole for name, x in found.items()})


def _placed(shape: ModelShape, layers: int, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    return miniature(shape, layers).to(device=device, dtype=dtype)  # pyright: ignore[reportCallIssue]


def miniature(shape: ModelShape, layers: int) -> LlamaForCausalLM:
    """The same for the same shape; weights are random, and none of these costs depends on them."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=WIDTH * shape.group,
        intermediate_size=WIDTH * shape.group,
        num_hidden_layers=layers,
        num_attention_heads=shape.group,
        num_key_value_heads=1,
        head_dim=shape.dim,
        max_position_embeddings=shape.positions or 2**17,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def letters(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer without a file: a token for every character, as far as the vocabulary goes."""
    known = ["<unk>", *string.printable][:vocabulary]
    made = Tokenizer(models.WordLevel({each: i for i, each in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def text_of(tokens: int | None) -> str | None:
    """A text of so many of these tokens, or the default one."""
    return None if tokens is None else "\n\n".join(language_reference())[:tokens]


@contextlib.contextmanager
def counting(passes: Passes, vocabulary: int, layers: int) -> Iterator[None]:
    """Count what goes through any layer, and through the output layer, of whichever model runs."""

    def seen(module: nn.Module, args: Any, output: Any) -> None:
        kind = type(module).__name__.lower()
        if not isinstance(output, Tensor):
            return
        if isinstance(module, nn.Linear) and module.out_features == vocabulary:
            part, share = "head_", 1.0
        elif kind.endswith(MULTIPLIER):
            part, share = "", 1.0 / layers
        else:
            return
        tokens = output.numel() // output.shape[-1]
        few = tokens <= FEW
        _add(passes, f"{part}reads" if few else f"{part}forward", share * (1 if few else tokens))
        if output.requires_grad:
            output.register_hook(lambda _: _add(passes, f"{part}backward", share * tokens))

    hook = nn.modules.module.register_module_forward_hook(seen)
    try:
        yield
    finally:
        hook.remove()


def _add(passes: Passes, name: str, amount: float) -> None:
    setattr(passes, name, getattr(passes, name) + amount)
