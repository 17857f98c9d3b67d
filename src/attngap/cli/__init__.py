"""The command line: `attngap VERB`. One verb per file; each imports what it needs when it runs."""

import os
import signal
import sys
from types import FrameType

# What Ctrl-C leaves behind: verbs that keep what they have finished, and long ones that write only at their end.
GOES_ON, STARTS_ANEW = " The same command goes on from here.", " Nothing was written; the same command starts anew."
GO_ON: dict[str, str] = dict.fromkeys(("diagnose", "linearize", "demo", "probe"), GOES_ON)
GO_ON |= dict.fromkeys(("eval", "bench", "theory"), STARTS_ANEW)
STOPPED = 130  # the exit code that shells expect after Ctrl-C


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2, never a traceback."""
    asked: list[int] = []  # Ctrl-C, remembered: while numpy loads it can come out as another exception

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    # Threads that wait for each other sleep after some 0.01 ms instead of 2: on a busy machine others have their core.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
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
    print(f"attngap: stopped.{GO_ON.get(sys.argv[1], '') if sys.argv[1:] else ''}", file=sys.stderr)
    sys.exit(STOPPED)
