"""`attngap generate`: text from a converted model, as it comes."""

from pathlib import Path
from typing import Annotated

import typer

from attngap.errors import AttngapError


def generate(
    directory: Annotated[Path, typer.Argument(help="Folder written by `attngap linearize`.")],
    prompt: Annotated[str, typer.Argument(help="What to continue.")],
    tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt, text and cache size as JSON.")] = False,
) -> None:
    """Continue a prompt in bounded memory; the text appears token by token.

    Example: attngap generate fast "The capital of France is"
    """
    if tokens < 1 or temperature < 0:
        raise AttngapError(f"--tokens must be at least 1 and --temperature at least 0, got {tokens}, {temperature}")
    if not (directory / "attngap.json").exists():
        raise AttngapError(f"No converted model in '{directory}'. Write one: attngap linearize MODEL -o {directory}")
    import torch
    from transformers import DynamicCache, TextStreamer

    from attngap.models.cache import cache_bytes
    from attngap.models.load import load

    model, tokenizer = load(directory)
    if model.get_output_embeddings() is None:
        raise AttngapError(f"'{directory}' holds an encoder, which writes no text. Use attngap.load and call the model")
    if chat and not getattr(tokenizer, "chat_template", None):
        raise AttngapError("This model has no chat template. Leave out --chat")
    if chat:
        message = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    inputs = tokenizer(prompt, return_tensors="pt")
    if inputs.input_ids.shape[1] == 0:
        raise AttngapError("The prompt is empty. Give some text to continue")
    torch.manual_seed(seed)
    cache = DynamicCache(config=model.config)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    streamer = None if as_json else TextStreamer(tokenizer, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
    out = model.generate(  # pyright: ignore[reportCallIssue]
        **inputs,
        max_new_tokens=tokens,
        streamer=streamer,
        past_key_values=cache,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **sampling,
    )
    if as_json:
        import json

        text = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        print(json.dumps({"prompt": prompt, "text": text, "cache_bytes": cache_bytes(cache)}))
