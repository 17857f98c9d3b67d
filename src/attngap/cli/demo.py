"""`attngap demo`: the whole story on a real model, in minutes, on a CPU."""

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from attngap.cli.start import start
from attngap.errors import AttngapError
from attngap.explorer.story import STORY

if TYPE_CHECKING:
    from attngap.conversion.receipt import Receipt
    from attngap.diagnosis.result import Diagnosis


class Sizes(NamedTuple):
    diagnosis: dict[str, Any]
    conversion: dict[str, Any]
    measures: dict[str, Any]
    phase: dict[str, Any]


# Small enough for twelve minutes on two cores; the commands printed at the end take longer and find more.
FULL = Sizes(
    diagnosis={"context": 512, "passages": 2, "ranks": (16, 64), "draws": 2, "window": 128},
    conversion={"context": 512, "tokens": 8192, "length": 2048, "steps": 60, "joint": 12, "rounds": 1},
    measures={"passages": 3, "lengths": (512,), "by_length": (512, 1024, 2048), "contexts": (1024, 4096, 16384)},
    phase={"n": 2**20, "d": 514, "m": 40, "b": 0.5, "cells": 24},
)
# Every step, too short to mean anything: shows that an installation works.
QUICK = Sizes(
    diagnosis={"context": 128, "passages": 1, "ranks": (8,), "draws": 1, "window": 32},
    conversion={"context": 128, "tokens": 1024, "length": 128, "steps": 2, "joint": 1, "rounds": 1},
    measures={"passages": 1, "lengths": (128,), "by_length": (256,), "contexts": (256,)},
    phase={"n": 2**10, "d": 66, "m": 20, "b": 0.5, "cells": 4},
)
KEEP = 0.1
NEW_TOKENS = 40


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Where everything goes, attngap-demo if not given; run again to resume.")
    ] = None,
    model: Annotated[str, typer.Option(help="Another model to tell the story with.")] = "smollm2",
    prompt: Annotated[
        str, typer.Option(help="What both models continue.", show_default="a page with a code word to recall")
    ] = STORY,
    quick: Annotated[
        bool, typer.Option("--quick", help="All steps in a minute or two, too short to mean anything: does it run?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON on stdout.")] = False,
) -> None:
    """Theory, diagnosis, plan, conversion, generation, receipt and report on a real model, in minutes.

    \b
    Example:
      attngap demo
    """
    folder = folder or Path("attngap-demo-quick" if quick else "attngap-demo")
    demo_run = Demo(folder, model, prompt, QUICK if quick else FULL, quiet=as_json)
    report = demo_run.run()
    if as_json:
        print(json.dumps({"report": str(report), "seconds": demo_run.seconds, "receipt": demo_run.receipt_numbers()}))


class Demo:
    """The steps in order; each leaves a file, and a file that is there is not made again."""

    def __init__(self, folder: Path, model: str, prompt: str, sizes: Sizes, *, quiet: bool):
        self.folder, self.name, self.prompt, self.sizes, self.quiet = folder, model, prompt, sizes, quiet
        self.seconds: dict[str, float] = {}
        self._loaded: tuple[Any, Any] | None = None

    def run(self) -> Path:
        _make(self.folder)
        self.say(f"Everything goes to {self.folder}/. Stopped at any point, the same command goes on from there.")
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("theory", self.theory),
            ("diagnose", self.diagnose),
            ("plan", self.plan),
            ("linearize", self.linearize),
            ("generate", self.generate),
            ("report", self.report),
        )
        self.load()  # a missing wheel is told before anything else
        for number, (name, step) in enumerate(steps, 1):
            self.say(f"\n[{number}/{len(steps)}] {name}", bold=True)
            start = time.monotonic()
            step()
            self.seconds[name] = round(time.monotonic() - start, 1)
        report = self.folder / "report.html"
        self.say(f"\nDone in {sum(self.seconds.values()) / 60:.1f} minutes. Open {report.absolute()}", bold=True)
        self.say("Next:\n" + "\n".join(f"  {line}" for line in next_commands(self.folder, self.name)))
        return report

    def say(self, text: str, *, bold: bool = False) -> None:
        """To the person: standard output, or the error stream when standard output is for JSON."""
        from rich.console import Console

        console = Console(stderr=self.quiet, highlight=False)
        console.print(text, style="bold" if bold else "", markup=False, soft_wrap=True)

    def load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from attngap.models.load import load

            self._loaded = load(self.name)
        return self._loaded

    def theory(self) -> None:
        for line in theory_lines():
            self.say(line)
        path = self.folder / "phase.json"
        if path.exists():
            return
        from attngap.progress import progress
        from attngap.provenance import provenance
        from attngap.theory.phase import phase

        with progress("phase diagram", total=8) as advance:
            found = phase(**self.sizes.phase, advance=advance)
        _write(path, {"schema": "attngap.phase/1", **found, "provenance": provenance()})

    def diagnose(self) -> None:
        from attngap.cli.diagnose import show, summary

        folder = self.folder / "diagnosis"
        if not (folder / "diagnosis.json").exists():
            sizes = self.sizes.diagnosis
            self.say(
                f"A short diagnosis: {sizes['passages']} passages of {sizes['context']} tokens; "
                "`attngap diagnose` takes 4 of 1024."
            )
            from attngap.diagnosis.diagnose import diagnose

            model, tokenizer = self.load()
            found = diagnose(model, tokenizer, directory=folder, name=self.name, quiet=False, **sizes)
            if not self.quiet:
                show(found, folder)
            return
        for line in summary(self._diagnosis()):
            self.say(line)

    def _diagnosis(self) -> "Diagnosis":
        from attngap.diagnosis.result import Diagnosis

        return Diagnosis.load(self.folder / "diagnosis")

    def plan(self) -> None:
        from attngap.cli.plan import show, signed
        from attngap.models.plan import Plan

        path = self.folder / "plan.json"
        if not path.exists():
            signed(self._diagnosis().plan(KEEP)).save(path)
        if not self.quiet:
            show(Plan.load(path), path)

    def linearize(self) -> None:
        from attngap.cli.linearize import show
        from attngap.storage.checkpoint import PIECES, claimed

        folder = self.folder / "converted"
        if not (folder / "receipt.json").exists() or claimed(folder / PIECES):
            sizes = self.sizes.conversion
            self.say(
                f"A short calibration: {sizes['tokens']:,} tokens in passages of {sizes['context']}; "
                "`attngap linearize` takes more, and finds more."
            )
            self._convert(folder)
        if not self.quiet:
            show(self._receipt(), folder)

    def _convert(self, folder: Path) -> None:
        from attngap.conversion.evaluate import Measures
        from attngap.conversion.linearize import linearize
        from attngap.models.plan import Plan
        from attngap.ops.pages import keep_freed

        keep_freed()
        model, tokenizer = self.load()
        linearize(
            model,
            tokenizer,
            Plan.load(self.folder / "plan.json"),
            measures=Measures(**self.sizes.measures),
            directory=folder,
            quiet=False,
            **self.sizes.conversion,
        )

    def _receipt(self) -> "Receipt":
        from attngap.conversion.receipt import Receipt

        return Receipt.load(self.folder / "converted")

    def receipt_numbers(self) -> dict[str, Any]:
        return self._receipt().model_dump(mode="json", include={"heads", "kept", "quality", "speed"})

    def generate(self) -> None:
        path = self.folder / "samples.json"
        if not path.exists() or json.loads(path.read_text())["prompt"] != self.prompt:
            from attngap.models.load import load
            from attngap.progress import progress
            from attngap.provenance import provenance

            original, tokenizer = self.load()
            with progress("writing with both models", total=2) as advance:
                texts = {"original": continue_text(original, tokenizer, self.prompt)}
                advance()
                texts["converted"] = continue_text(load(self.folder / "converted")[0], tokenizer, self.prompt)
                advance()
            model = {"name": self.name}
            content = {"schema": "attngap.samples/1", "model": model, "prompt": self.prompt, "texts": texts}
            _write(path, content | {"provenance": provenance()})
        self.show_texts(json.loads(path.read_text()))

    def show_texts(self, samples: dict[str, Any]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        words = samples["prompt"].split()
        told = samples["prompt"] if len(words) < 60 else f"{' '.join(words[:24])} [...] {' '.join(words[-24:])}"
        table = Table(title=Text(f"“{told}”", justify="left"), expand=True)
        for name in samples["texts"]:
            table.add_column(name, ratio=1)
        table.add_row(*(Text(text) for text in samples["texts"].values()))
        Console(stderr=self.quiet, markup=False).print(table)

    def report(self) -> None:
        from attngap.cli.report import write_page
        from attngap.report.build import report_page
        from attngap.report.results import read

        path = self.folder / "report.html"
        size = write_page(path, report_page(read([self.folder])))
        self.say(f"{path}: one page of {size / 1e6:.1f} MB that opens anywhere, without a network.")


def theory_lines() -> list[str]:
    """The separation in ten lines, computed now."""
    from attngap.theory.separation import law

    setting = {"d": 514, "a0": 0.05, "b": 0.5, "m": 40}
    lines = [
        "One needle among n tokens: does attention notice it? Probability of success, exact:",
        "  tokens n     softmax, a = 0.4    softmax, a = 0.7    linear, a = 0.7",
    ]
    for power in (3, 6, 9, 12):
        n = round(10**power / 512) * 512
        weak, strong = (law("softmax", n=n, a1=a, **setting).success for a in (0.4, 0.7))
        linear = law("linear", n=n, a1=0.7, **setting).success
        lines.append(f"  10^{power:<2}     {weak:16.4f}    {strong:16.4f}    {linear:15.4f}")
    return [
        *lines,
        "To put half of its weight on one of 10^6 equal tokens softmax needs a logit gap of 13.8; linear attention",
        "needs a score ratio of 10^6. As n grows softmax concentrates beyond a = 0.618, the inverse golden ratio.",
        "These are the weights of one construction; others let linear attention separate too, at that ratio's price.",
        "So a head that selects among many needs softmax, and the others may not: which is which, in this model?",
    ]


def next_commands(folder: Path, model: str) -> list[str]:
    """Lines that run as they are printed, from here."""
    attngap, place, name = start(), shlex.quote(str(folder)), shlex.quote(model)
    return [
        f"{attngap} serve {place} --model {place}/converted  # both models in the browser; Ctrl-C ends it",
        f'{attngap} generate {place}/converted "Once upon a time"',
        f"{attngap} diagnose {name} -o diagnosis  # in full; or your own model: a folder, an id, a .gguf file",
        f"{attngap} linearize {name} --keep 0.1 -o fast",
    ]


def continue_text(model: Any, tokenizer: Any, prompt: str) -> str:
    """Greedy, so that both models get the same chance."""
    inputs = tokenizer(prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(out[0, length:], skip_special_tokens=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AttngapError(f"Cannot use '{folder}': {error.strerror}. Choose another with --folder") from None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: a half-written file would be taken for a finished step."""
    from attngap.storage.files import write_text

    write_text(path, json.dumps(content))
