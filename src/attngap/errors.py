"""One exception for every mistake a caller can mend: it says what, got, allowed, next."""

import difflib
from collections.abc import Iterable


class AttngapError(ValueError):
    """A user's mistake or a limit of ours, in one line that can be acted on. The command line prints it and exits 2."""


def unknown(kind: str, got: str, allowed: Iterable[str], hint: str = "") -> AttngapError:
    """`No mechanism 'gal'. Did you mean 'gla'? Allowed: ...` with the closest name first."""
    names = [str(name) for name in allowed]
    close = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return AttngapError(f"No {kind} {got!r}.{meant} {hint or 'Allowed: ' + ', '.join(names)}")
