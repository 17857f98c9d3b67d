"""Runs that are killed, or whose disk is full, at every step on disk: the same command then gives the same result.

A process that has done everything once, and so has it loaded and compiled, is forked for each run, so that one takes
half a second. In the child an audit hook counts what happens to the folder of results: a file opened for writing,
renamed or removed, a folder made or removed. At a given count the child is killed as by `kill -9`, or no file may grow
from there on, as on a full disk. At a random time it is killed, or stopped by Ctrl-C, which must have a last word.
"""

import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from attngap.cli import GOES_ON, STOPPED
from tests.conversion.small import TEXT
from tests.trust.outcome import Outcome
from tests.zoo import tiny, tokenizer

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
PATIENCE = 600  # seconds for a run that takes half a second of a processor, which others may keep busy
ENDED = (0, -signal.SIGKILL, -signal.SIGPROF)  # as it should, or by a signal of ours
QUICK = ("--context", "64", "--tokens", "448", "--steps", "4", "--joint", "3", "--rounds", "1", "--no-measure")
QUICK += ("--window", "8", "--sinks", "2", "--keep", "0.25", "--granularity", "head")
VERBS = {
    "diagnose": ("diagnose", "{model}", "--text", "{text}", "--context", "64", "--ranks", "8,16", "-o", "{out}"),
    "linearize": ("linearize", "{model}", "--text", "{text}", *QUICK, "-o", "{out}"),
    "linearize --overwrite": ("linearize", "{model}", "--text", "{text}", *QUICK, "--overwrite", "-o", "{out}"),
}  # fmt: skip


@dataclasses.dataclass
class Ended:
    code: int  # negative: the signal that ended it
    said: str
    events: int
    seconds: float  # of the processor


class Bench:
    """A folder with a tiny model, a text, and what each verb makes of them when nothing disturbs it."""

    def __init__(self, folder: Path, verbs: Iterable[str] = tuple(VERBS)):
        import attngap.cli.app

        self.folder = folder
        model, words = tiny(), tokenizer()
        model.save_pretrained(folder / "model")
        words.save_pretrained(folder / "model")
        (folder / "text.txt").write_text(TEXT)
        self.expected: dict[str, dict[str, Any]] = {}
        self.events: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        for verb in ("diagnose", "linearize"):  # in this process: its children have all code loaded
            warm = CliRunner().invoke(attngap.cli.app.app, self.words(verb, self.place(verb, "warm")))
            assert warm.exit_code == 0, warm.exception
        old = self.run("linearize", folder / "old", seed=1)
        assert old.code == 0, old.said
        for verb in verbs:
            out = self.place(verb, "whole")
            ended = self.run(verb, out)
            assert ended.code == 0, ended.said
            self.expected[verb], self.events[verb] = content(out), ended.events
            self.seconds[verb] = ended.seconds

    def words(self, verb: str, out: Path, seed: int = 0) -> list[str]:
        """The command of a verb."""
        places = {"model": self.folder / "model", "text": self.folder / "text.txt", "out": out}
        return [*(word.format(**places) for word in VERBS[verb]), "--seed", str(seed)]

    def place(self, verb: str, name: str) -> Path:
        """A folder to write into; what is to be overwritten is there already, made with another seed."""
        out = self.folder / f"{verb.split()[0]}-{name}"
        shutil.rmtree(out, ignore_errors=True)
        if "--overwrite" in verb:
            shutil.copytree(self.folder / "old", out)
        return out

    def run(self, verb: str, out: Path, at: Callable[[int], None] | None = None, seed: int = 0, **end: Any) -> Ended:
        """The verb in a child; `at(n)` is called there before event n, `end` says when and how it is ended."""
        words = self.words(verb, out, seed)
        return forked(lambda: command(words), out, at, **end)

    def disturbed(self, verb: str, name: str, at: Callable[[int], None] | None = None, **end: Any) -> str | None:
        """Disturb a run, start it again, and compare: what is wrong, or None."""
        out = self.place(verb, name)
        first = self.run(verb, out, at, **end)
        told = first.code == 2 or (first.code == STOPPED and first.said.endswith(f"attngap: stopped.{GOES_ON}\n"))
        if first.code not in ENDED and (not told or "Traceback" in first.said):
            return f"it ended with {first.code} and said {first.said!r}"
        again = first
        for _ in range(2):  # a folder that had been finished is refused as "already holds": that is an answer, too
            if again.code == 0:
                break
            again = self.run(verb, out)
        if again.code != 0 and "already holds" not in again.said:
            return f"ended with {first.code} ({first.said!r}), then with {again.code}: {again.said!r}"
        found = content(out)
        if found != self.expected[verb]:
            return f"another result: {difference(found, self.expected[verb])}"
        shutil.rmtree(out)
        return None


def forked(
    work: Callable[[], None],
    watched: Path,
    at: Callable[[int], None] | None,
    *,
    after: float = 0,
    interrupted: bool = False,
) -> Ended:
    """Do the work in a fork; its last words on stderr and the number of events.

    `after` seconds of the processor it is killed, or `interrupted` as by Ctrl-C.
    """
    heard, told = os.pipe()
    counted, counter = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard)
        os.close(counted)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(told, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        seen = watch(str(watched), at)
        if interrupted:
            signal.signal(signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGINT))
        if after:
            signal.setitimer(signal.ITIMER_PROF, after)  # where nobody handles its signal, it ends the process
        code = 1
        try:
            work()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stderr.flush()
        os.write(counter, str(seen[0]).encode())
        os._exit(code)
    os.close(told)
    os.close(counter)
    ends = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < ends:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    said, events = (open(pipe, "rb").read().decode() for pipe in (heard, counted))  # noqa: SIM115
    return Ended(os.waitstatus_to_exitcode(status), said, int(events or 0), used.ru_utime + used.ru_stime)


def command(words: list[str]) -> None:
    """What `attngap WORDS` does."""
    from attngap.cli import main

    sys.argv = ["attngap", *words]
    main()


def watch(folder: str, at: Callable[[int], None] | None) -> list[int]:
    """Count what happens below the folder, from now on."""
    seen, busy = [0], [False]

    def hook(event: str, args: tuple) -> None:
        if event not in EVENTS or busy[0] or not str(args[0]).startswith(folder):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        seen[0] += 1
        if at is not None:
            busy[0] = True
            at(seen[0])
            busy[0] = False

    sys.addaudithook(hook)
    return seen


def kill_at(event: int) -> Callable[[int], None]:
    return lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == event else None


def full_from(event: int, room: int) -> Callable[[int], None]:
    """From this event on no file grows beyond `room` bytes: writes fail inside of every library."""

    def limit(number: int) -> None:
        if number == event:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    return limit


def content(folder: Path) -> dict[str, Any]:
    """Every file of a result by name, without what differs between equal runs: times, commands and folders."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            found[name] = json.loads(path.read_text())
            found[name]["order"] = json.dumps(found[name].get("heads"))
            for key in ("provenance", "seconds", "notes"):  # a note says that the run was resumed
                found[name].pop(key, None)
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tobytes() for key in arrays.files}
        elif path.suffix == ".parquet":
            found[name] = pd.read_parquet(path).to_json()
        elif path.is_file():
            lines = path.read_bytes().replace(str(folder).encode(), b"FOLDER").splitlines()
            found[name] = [line for line in lines if not line.startswith(b"- this run resumed")]
        else:
            found[name] = None
    return found


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    names = [name for name in sorted(found.keys() | expected.keys()) if found.get(name, 0) != expected.get(name, 0)]
    return ", ".join(
        f"{name} ({'missing' if name not in found else 'not expected' if name not in expected else 'differs'})"
        for name in names
    )


def disturb(bench: Bench, verb: str, how: str, step: int) -> Outcome:
    """Kill a run, or fill its disk, at one of its steps; or kill or interrupt it at a random time."""
    outcome, draw = Outcome(), random.Random(f"{verb} {how} {step}")
    event = 1 + step % bench.events[verb]
    name = f"{how.replace(' ', '-')}-{step}"
    if how == "killed":
        wrong = bench.disturbed(verb, name, kill_at(event))
    elif how == "disk full":
        wrong = bench.disturbed(verb, name, full_from(event, draw.choice((0, 1, 100, 4096))))
    else:
        moment = draw.uniform(0.01, bench.seconds[verb])
        wrong = bench.disturbed(verb, name, after=moment, interrupted=how == "interrupted at a random time")
    outcome.count(f"{verb}, {how}")
    if wrong:
        outcome.faults.append(f"{verb}, {how}, step {event} of {bench.events[verb]}: {wrong}")
    return outcome
