"""`attngap generate`: text from a converted model or any other, as it comes."""

import json
import sys
from typing import Annotated, Any

import typer

from attngap.cli.chat import check_sampling, say, talk
from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype, placed
from attngap.errors import AttngapError
from attngap.options import HELD


def generate(
    model: Annotated[str, typer.Argument(help="A folder written by `attngap linearize`, or any model by its name.")],
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue; - or a pipe reads it from standard input.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    exact_prompt: Annotated[
        bool, typer.Option("--exact-prompt", help="Read the prompt with softmax in every head, then go on converted.")
    ] = False,
    hold: Annotated[
        float | None,
        typer.Option(
            help="With --exact-prompt: share of each window for tokens from anywhere in the prompt.",
            show_default=str(HELD),
        ),
    ] = None,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt, text and cache size as JSON.")] = False,
) -> None:
    """Continue a prompt in bounded memory; the text appears token by token. Without a prompt: a conversation.

    \b
    Examples:
      attngap generate fast "The capital of France is"
      attngap generate smollm2 - < letter.txt
      attngap generate fast - --exact-prompt < book.txt
    """
    check_sampling(tokens, temperature)
    if hold is not None and not exact_prompt:
        raise AttngapError("--hold says what is kept of a prompt that is read exactly. Give --exact-prompt too")
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is None:
        talk(model, tokens=tokens, temperature=temperature, seed=seed, dtype=dtype, device=device)
        return
    if not prompt:
        raise AttngapError("The prompt is empty. Give some text to continue")
    from attngap.models.load import load

    loaded, tokenizer = load(model, **placed(dtype, device))
    if not loaded.can_generate():
        raise AttngapError(f"'{model}' is an encoder, which writes no text. Use attngap.load and call the model")
    if chat:
        prompt = in_template(tokenizer, prompt)
    held = (HELD if hold is None else hold) if exact_prompt else None
    text, size = write(loaded, tokenizer, prompt, tokens, temperature, seed, show=not as_json, held=held)
    if as_json:
        print(json.dumps({"prompt": prompt, "text": text, "cache_bytes": size}))
    else:
        say(f"[cache {size / 1e6:.1f} MB]")


def in_template(tokenizer: Any, prompt: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise AttngapError("This model has no chat template. Leave out --chat")
    message = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def write(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    *,
    show: bool,
    held: float | None = None,
) -> tuple[str, int]:
    """The continuation and the size of its cache.

    Unless `held` is None, every head reads the prompt with softmax, and that share of each window is for tokens from
    anywhere in it.
    """
    import torch
    from transformers import DynamicCache, TextStreamer

    from attngap.models.cache import cache_bytes
    from attngap.models.placement import device_of
    from attngap.models.prefill import exact_prefill
    from attngap.models.twin import PIECE

    inputs = tokenizer(prompt, return_tensors="pt").to(device_of(model))
    if inputs.input_ids.shape[1] == 0:
        raise AttngapError("The prompt is empty. Give some text to continue")
    torch.manual_seed(seed)
    cache = DynamicCache(config=model.config) if held is None else exact_prefill(model, inputs.input_ids[:, :-1], held)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    out = model.generate(
        **inputs,
        max_new_tokens=tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if show else None,
        past_key_values=cache,
        prefill_chunk_size=PIECE if held is None else None,  # beyond the cache, memory does not grow with the prompt
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **sampling,
    )
    return tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True), cache_bytes(cache)
