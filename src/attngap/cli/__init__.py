"""The command line: `attngap VERB`. One verb a file; each imports what it needs when it runs."""

import sys


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        from attngap.cli.app import app  # inside: Ctrl-C while it loads is no traceback either
        from attngap.errors import AttngapError

        try:
            app()
        except AttngapError as error:
            print(f"attngap: {error}", file=sys.stderr)
            sys.exit(2)
    except KeyboardInterrupt:
        print("attngap: stopped", file=sys.stderr)
        sys.exit(130)
