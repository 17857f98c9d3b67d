"""The command line: `attngap VERB`. One verb per file; each imports what it needs when it runs."""

import os
import signal
import sys
from types import FrameType

RESUMABLE = ("diagnose", "linearize", "demo", "probe")  # verbs that keep what they have finished
STOPPED = 130  # the exit code that shells expect after Ctrl-C


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2, never a traceback."""
    asked: list[int] = []  # Ctrl-C, remembered: while numpy loads it can come out as another exception

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    # Threads that wait for each other sleep after some 0.1 ms instead of 2: on a busy machine others have their core.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        signal.signal(signal.SIGINT, stop)
        from attngap.cli.app import app  # inside: Ctrl-C while it loads is no traceback either
        from attngap.errors import AttngapError

        try:
            app()
        except AttngapError as error:
            print(f"attngap: {error}", file=sys.stderr)
            sys.exit(2)
    except KeyboardInterrupt:
        _stopped()
    except SystemExit as left:
        if left.code != STOPPED:
            raise
        _stopped()
    except Exception:
        if not asked:
            raise
        _stopped()


def _stopped() -> None:
    go_on = " The same command goes on from here." if sys.argv[1:2] and sys.argv[1] in RESUMABLE else ""
    print(f"attngap: stopped.{go_on}", file=sys.stderr)
    sys.exit(STOPPED)
