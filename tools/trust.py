"""The long run: kills, full disks, damaged files, hostile numbers, forbidden pages, a million tokens.

python tools/trust.py                    everything that is not done yet; a stopped run goes on
python tools/trust.py files numerics     some parts
python tools/trust.py --show             what was found so far

Units of work are done in another process, so that a crash costs one unit and is counted as a fault. Results are kept in
.trust/, by the state of the source they were found with; docs/reliability.md tells of them.
ATTNGAP_TRUST_SEED=1000 damages other files than the run before.
"""

import argparse
import concurrent.futures
import hashlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.trust.outcome import Outcome  # noqa: E402
from tests.trust.parts import PARTS  # noqa: E402

KEPT = Path(os.environ.get("ATTNGAP_TRUST", ROOT / ".trust"))
PATIENCE = 1800  # seconds for one unit


def prepare() -> None:
    """A worker: one thread, no words of others."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  progress of thousands of runs


def work(part: str, unit: list) -> dict:
    return PARTS[part].run(*unit).plain()


def run(part: str) -> Outcome:
    """All units of a part that are not done yet; what was found in all of them."""
    path, source = KEPT / f"{part}.jsonl", source_hash()
    path.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {json.dumps(row["unit"]): row for row in rows if row["source"] == source}
    units = [list(unit) for unit in PARTS[part].units()]
    total, began, pool = Outcome(), time.monotonic(), None
    for number, unit in enumerate(units):
        row = done.get(json.dumps(unit))
        if row is None:
            pool = pool or new_pool()
            start = time.monotonic()
            try:
                found = pool.submit(work, part, unit).result(PATIENCE)
            except (BrokenProcessPool, TimeoutError) as error:
                found = Outcome(faults=[f"{unit}: {type(error).__name__}, the process ended or hung"]).plain()
                stop(pool)
                pool = None
            except Exception as error:
                found = Outcome(faults=[f"{unit}: {type(error).__name__}: {error}"]).plain()
            if found["faults"] and pool is not None:  # what was stopped in the middle may have left anything behind
                stop(pool)
                pool = None
            seconds = round(time.monotonic() - start, 2)
            row = {"unit": unit, "source": source, "commit": commit(), "seconds": seconds, **found}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        total.add(Outcome(row["counts"], row["worst"], row["faults"]))
        if number % 20 == 19 or number == len(units) - 1:
            tried = sum(total.counts.values())
            print(f"{part}: {number + 1} of {len(units)} units, {tried} tried, {len(total.faults)} faults, "
                  f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    if pool is not None:
        stop(pool)
    return total


def new_pool() -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=prepare)


def stop(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def source_hash() -> str:
    """Of all that is tried and of what tries it."""
    digest = hashlib.sha256()
    for folder in ("src/attngap", "tests/trust"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip()


def show(part: str) -> None:
    """Counts and worst figures of the latest run of a part, as Markdown."""
    path = KEPT / f"{part}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if row["source"] == rows[-1]["source"]]
    if not rows:
        print(f"{part}: not run yet")
        return
    total = Outcome()
    for row in rows:
        total.add(Outcome(row["counts"], row["worst"], row["faults"]))
    seconds = sum(row["seconds"] for row in rows)
    print(f"\n## {part}: {PARTS[part].about}, commit {rows[-1]['commit']}, {seconds / 60:.0f} min")
    print(f"{sum(total.counts.values())} tried, {len(total.faults)} faults")
    for kind in sorted(total.counts | total.worst):
        print(f"| {kind} | {total.counts.get(kind, '')} | {total.worst.get(kind, float('nan')):.3g} |")
    print(*total.faults[:20], sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them unless some are named")
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # for the workers: threads of one wait for each other on a busy machine
    parser.add_argument("--show", action="store_true", help="print what was found and run nothing")
    asked = parser.parse_args()
    if unknown := [part for part in asked.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    faults = 0
    for part in asked.parts or PARTS:
        if asked.show:
            show(part)
        else:
            faults += len(run(part).faults)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
