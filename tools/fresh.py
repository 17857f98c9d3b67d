"""The steps of tools/fresh.sh, which makes the clean surroundings. Standard library alone: nothing is installed yet."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PAGES = ("README.md", "docs/getting-started.md")
RUNNER = ("pytest>=8", "beartype>=0.18", "hypothesis>=6.100")
TESTS = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not browser")
# An environment with no extra, one with serve (which brings report), one with demo (which brings serve and native).
BARE = ("tests/test_package.py", "tests/test_errors.py", "tests/test_options.py", "tests/models/test_load.py")
SERVE = ("tests/explorer", "tests/charts", "tests/report", "tests/cli/test_serve.py", "tests/cli/test_report.py")
DEMO = ("tests/models/test_gguf.py", "tests/cli/test_demo.py")
WAIT = 600  # seconds for a server to answer: it loads a model first


def main() -> None:
    parser = argparse.ArgumentParser(description="See tools/fresh.sh")
    parser.add_argument("--short", action="store_true")
    fresh = Fresh(Path.cwd())
    fresh.short() if parser.parse_args().short else fresh.whole()
    fresh.say_total()


class Fresh:
    """Runs one step after another; the first that fails ends it."""

    def __init__(self, checkout: Path):
        self.checkout, self.began, self.peak = checkout, time.monotonic(), 0

    def short(self) -> None:
        printed = self.step("make", "demo", f"PYTHON={sys.executable}", "DEMO=--quick")
        self.require("attngap-demo-quick/report.html")
        for line in next_lines(printed):
            if line.split()[1] in ("serve", "generate"):  # the others are the full recipe: long
                self.line(line)
        self.extras()

    def whole(self) -> None:
        printed = self.step("make", "demo", f"PYTHON={sys.executable}")
        self.require("attngap-demo/report.html")
        shown = next_lines(printed) + [line for page in PAGES for line in shell_lines(self.checkout / page)]
        seen = {command(line) for line in ("make demo", "make test")}
        for line in shown:
            if command(line) not in seen:  # the demo and several pages may show one command
                seen.add(command(line))
                self.line(line)
        self.extras()
        self.step("make", "test", f"PYTHON={sys.executable}")  # last: it installs every other extra

    def line(self, line: str) -> None:
        """A line as a document shows it."""
        words = shlex.split(line, comments=True)
        if words[:2] == [".", ".venv/bin/activate"]:
            os.environ["PATH"] = f"{self.checkout / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        elif words[1] == "serve":
            serve(words)
        else:
            self.step("bash", "-euc", line)

    def extras(self) -> None:
        """Nothing may be there by accident: each extra's tests run where only that extra is."""
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            python = str(place / "bare" / "bin" / "python")
            self.step(sys.executable, "-m", "venv", str(place / "bare"))
            self.step(python, "-m", "pip", "install", "--quiet", pinned_torch(self.checkout), *RUNNER)
            self.step(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, ".")
            (wheel,) = place.glob("attngap-*.whl")
            self.step(python, "-m", "pip", "install", "--quiet", str(wheel))
            self.step(python, "tools/bare.py", str(place / "work"))
            self.step(python, *TESTS, *BARE)
            self.step("bash", "-euc", self.advice(str(place / "bare" / "bin" / "attngap"), "serve"))
            self.step(python, *TESTS, *SERVE)
        python = ".venv/bin/python"
        self.step(python, "-m", "pip", "install", "--quiet", *RUNNER)
        self.step(python, *TESTS, *DEMO)

    def advice(self, *command: str) -> str:
        """The pip line that a command without its extra tells to run."""
        done = subprocess.run(command, capture_output=True, text=True)
        found = re.fullmatch(r"attngap: .* Run: (.* -m pip install .*)\n", done.stderr)
        if done.returncode != 2 or not found:
            sys.exit(f"FAILED: {shlex.join(command)} names no pip line: {done.stderr}")
        return found[1]

    def step(self, *command: str) -> str:
        """Run it, show and return what it prints, and say what it took."""
        print(f"== {shlex.join(command)}", flush=True)
        start, printed = time.monotonic(), []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        memory = usage.ru_maxrss // 1024
        self.peak = max(self.peak, memory)
        print(f"-- {time.monotonic() - start:.0f} s, at most {memory} MB in one process", flush=True)
        if process.returncode:
            sys.exit(f"FAILED with exit code {process.returncode}: {shlex.join(command)}")
        return "".join(printed)

    def require(self, path: str) -> None:
        if not (self.checkout / path).is_file():
            sys.exit(f"FAILED: {path} was not written")

    def say_total(self) -> None:
        seconds = round(time.monotonic() - self.began)
        sizes = {name: megabytes(Path(name)) for name in (".venv", ".", os.environ["HOME"])}
        print(
            f"Fresh machine: all passed in {seconds // 60} min {seconds % 60} s. The checkout takes {sizes['.']} MB, "
            f"{sizes['.venv']} of them .venv, the home folder {sizes[os.environ['HOME']]} MB. "
            f"At most {self.peak} MB of memory in one process."
        )


def command(line: str) -> tuple[str, ...]:
    """What a line runs, however its program is found."""
    words = shlex.split(line, comments=True)
    return Path(words[0]).name, *words[1:]


def next_lines(printed: str) -> list[str]:
    """The demo's own: indented, after `Next:`."""
    after = printed.split("\nNext:\n")[-1]
    return [line.strip() for line in after.splitlines() if line.startswith("  ")]


def shell_lines(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def pinned_torch(checkout: Path) -> str:
    found = re.search(r"^TORCH \?= (.*)$", (checkout / "Makefile").read_text(), flags=re.MULTILINE)
    assert found is not None, "the Makefile pins torch"
    return found[1]


def serve(words: list[str]) -> None:
    """Start the explorer, read its page, end it as Ctrl-C does."""
    print(f"== {shlex.join(words)}", flush=True)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    signal.alarm(WAIT)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    if found is None:
        sys.exit(f"FAILED: {shlex.join(words)} gave no address")
    time.sleep(2)  # it says its address before it answers
    page = urllib.request.urlopen(found[0], timeout=60).read().decode()
    process.send_signal(signal.SIGINT)
    code = process.wait()
    signal.alarm(0)
    if code not in (0, 130, -signal.SIGINT) or "attngap" not in page:
        sys.exit(f"FAILED: {shlex.join(words)} ended with {code}")
    print(f"-- a page of {len(page)} characters, exit code {code}", flush=True)


def megabytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) // 2**20


if __name__ == "__main__":
    main()
