"""`attngap chat`: talk to a converted model, to its original, or to both, and watch their caches."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype, placed
from attngap.errors import AttngapError, unknown

if TYPE_CHECKING:
    from attngap.models.stream import Conversation

COMMANDS = {
    "/original": "answer with the original from now on",
    "/converted": "answer with the converted model",
    "/both": "answer with both, one after the other",
    "/clear": "forget the conversation",
    "/help": "show these lines",
    "/quit": "leave (as Ctrl-D does)",
}


def chat(
    model: Annotated[str, typer.Argument(help="A folder written by `attngap linearize`, or any model.")],
    which: Annotated[str, typer.Option(help="Who answers: converted, original, both.")] = "converted",
    tokens: Annotated[int, typer.Option(help="At most this many tokens an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
) -> None:
    """Talk to a model; it remembers what was said. After each answer: tokens read, size of the cache, speed.

    \b
    Examples:
      attngap chat fast
      attngap chat fast --which both
    """
    talk(model, which=which, tokens=tokens, temperature=temperature, seed=seed, dtype=dtype, device=device)


def talk(
    model: str,
    *,
    which: str = "converted",
    tokens: int,
    temperature: float,
    seed: int,
    dtype: str = DTYPE,
    device: str = DEVICE,
) -> None:
    """The loop behind `chat`, and behind `generate` without a prompt."""
    check_sampling(tokens, temperature)
    if which not in ("converted", "original", "both"):
        raise unknown("model to answer", which, ("converted", "original", "both"))
    sampling = {"limit": tokens, "temperature": temperature, "seed": seed}
    session = Session(open_models(model, **placed(dtype, device)), which, sampling)
    say(f"{model}: type, and Enter sends it. {' '.join(COMMANDS)}")
    for line in lines_typed():
        if line in COMMANDS:
            if line == "/quit":
                return
            session.command(line)
        elif line.startswith("/"):
            say(str(unknown("command", line, COMMANDS)))
        elif line:
            session.answer(line)


class Session:
    """One history, read by every model that answers."""

    def __init__(self, models: "dict[str, Conversation]", which: str, options: dict[str, Any]):
        self.models, self.options = models, options
        self.messages: list[dict[str, str]] = []
        self.asked = list(models) if which == "both" or which not in models else [which]

    def command(self, line: str) -> None:
        name = line.removeprefix("/")
        if name == "clear":
            self.messages.clear()
            say("Forgotten.")
        elif name == "help":
            say("\n".join(f"{command:<11} {meaning}" for command, meaning in COMMANDS.items()))
        elif name == "both" or name in self.models:
            self.asked = list(self.models) if name == "both" else [name]
            say(f"Now answering: {', '.join(self.asked)}.")
        else:
            say(f"There is no {name} model here; this one is not converted.")

    def answer(self, text: str) -> None:
        """Both read the same history: that of the model named first."""
        asked = [*self.messages, {"role": "user", "content": text}]
        replies = [self._stream(name, asked) for name in self.asked]
        self.messages = [*asked, {"role": "assistant", "content": replies[0]}]

    def _stream(self, name: str, messages: list[dict[str, str]]) -> str:
        text, step, spent, count = "", None, 0.0, 0
        if len(self.asked) > 1:
            say(f"{name}:")
        try:
            for step in self.models[name].reply(messages, **self.options):
                print(step.text, end="", flush=True)
                text, count = text + step.text, count + 1
                spent += step.seconds if count > 1 else 0.0  # the first reads the prompt
        except KeyboardInterrupt:
            say("\n(cut short; what was said so far stays in the conversation)")
        print(flush=True)
        if step is not None:
            rate = f", {(count - 1) / spent:.1f} tokens/s" if spent else ""
            say(f"[{name}: {step.tokens:,} tokens, cache {step.cache_bytes / 1e6:.1f} MB{rate}]")
        return text


def open_models(name: str, **where: Any) -> "dict[str, Conversation]":
    """`converted` and `original` of a converted folder; any other model answers as `original`."""
    from attngap.models.load import load
    from attngap.models.save import load_base, read_record
    from attngap.models.stream import Conversation

    folder = Path(name)
    if not (folder / "attngap.json").exists():
        return {"original": Conversation(*load(name, **where))}
    original, tokenizer = load_base(folder, read_record(folder), **where)
    converted, _ = load(folder, **where)
    return {"converted": Conversation(converted, tokenizer), "original": Conversation(original, tokenizer)}


def check_sampling(tokens: int, temperature: float) -> None:
    if tokens < 1 or temperature < 0:
        raise AttngapError(f"--tokens must be at least 1 and --temperature at least 0, got {tokens}, {temperature}")


def lines_typed() -> Iterator[str]:
    """Lines as a person types them, with arrow keys and history where the terminal has them; Ctrl-D ends."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is there
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit leaves)")


def say(text: str) -> None:
    """Beside the model's own words, which alone go to standard output."""
    print(text, file=sys.stderr, flush=True)
