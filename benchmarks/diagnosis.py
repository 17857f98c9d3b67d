"""What a diagnosis costs: statistics against the model's own forward pass as the context grows, and a full run.

    python benchmarks/diagnosis.py                     statistics at 1024, 2048, 4096 and 8192 tokens
    python benchmarks/diagnosis.py --full              a whole diagnosis with the defaults

Each measurement runs in a process of its own, so that its peak memory is its own: of the sum over that process and its
workers, pages they share counted once, sampled every second (Linux).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MODEL = "smollm2"
SAMPLE = 1.0  # seconds between two looks at the memory, which cost some hundredths each


def forward(context: int) -> dict[str, float]:
    """The model's own forward pass, logits included, best of three (of two at 8192 tokens)."""
    import torch

    model, tokens = _inputs(context)
    seconds = []
    for _ in range(_repeats(context)):
        start = time.perf_counter()
        with torch.no_grad():
            model(tokens, use_cache=False)
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds)}


def statistics(context: int) -> dict[str, float]:
    """Forward pass of the body with every statistic of every row of every head, as --quick does it; best likewise."""
    import torch

    from attngap.diagnosis.survey import survey
    from attngap.heads.inputs import layer_inputs
    from attngap.models.capture import capture

    model, tokens = _inputs(context)

    def watch(call) -> None:
        for one in layer_inputs(call):
            survey(one, window=64, sinks=4)

    seconds = []
    for _ in range(_repeats(context)):
        start = time.perf_counter()
        with torch.no_grad(), capture(model.base_model, watch):
            model.base_model(tokens, use_cache=False)
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds)}


def full(context: int) -> dict[str, float]:
    """A whole diagnosis with the default options."""
    from attngap.diagnosis.diagnose import diagnose
    from attngap.models.load import load

    model, tokenizer = load(MODEL)
    start = time.perf_counter()
    found = diagnose(model, tokenizer, context=context)
    return {"seconds": time.perf_counter() - start, **found.seconds}


def _repeats(context: int) -> int:
    return 3 if context < 8192 else 2


def _inputs(context: int):
    from attngap.heads.passages import passages
    from attngap.models.load import load

    model, tokenizer = load(MODEL)
    return model, passages(tokenizer, context=context, count=1)


def measured(task: str, context: int) -> dict[str, float]:
    """Run one task in a fresh process and watch its memory."""
    command = [sys.executable, __file__, "--task", task, "--context", str(context)]
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(proportional, family(process.pid))))
            time.sleep(SAMPLE)
        assert process.stdout is not None
        written = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(written) | {"gigabytes": peak}


def family(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    try:
        children = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it ended meanwhile
        return
    for child in " ".join(children).split():
        yield from family(int(child))


def proportional(pid: int) -> float:
    """Gigabytes of a process, a page that n processes share counted as 1/n in each (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,2048,4096,8192")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--task", choices=["forward", "statistics", "full"], help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    if options.task:
        found = {"forward": forward, "statistics": statistics, "full": full}[options.task](options.context)
        print(json.dumps(found))
        return
    if options.full:
        print(json.dumps(measured("full", options.context)))
        return
    print(f"{'tokens':>7} {'forward s':>10} {'statistics s':>13} {'ratio':>6} {'forward GB':>11} {'statistics GB':>14}")
    for context in map(int, options.contexts.split(",")):
        own, ours = measured("forward", context), measured("statistics", context)
        ratio = ours["seconds"] / own["seconds"]
        print(
            f"{context:>7} {own['seconds']:>10.2f} {ours['seconds']:>13.2f} {ratio:>6.2f} "
            f"{own['gigabytes']:>11.2f} {ours['gigabytes']:>14.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
