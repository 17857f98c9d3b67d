"""What a result says beside its numbers, as sentences in one box."""

from collections.abc import Iterable

from attngap.report.page import Text

NAMES = {"n_star": "n*"}  # what a field is called on the page


def notes(lines: Iterable[str]) -> Text:
    return Text([sentence(line) for line in dict.fromkeys(lines)], "note")


def sentence(line: str) -> str:
    """
    >>> sentence("n_star extrapolates")
    'n* extrapolates.'
    >>> sentence("floors tried 7 of 92 cuts")
    'Floors tried 7 of 92 cuts.'
    """
    for key, name in NAMES.items():
        line = line.replace(key, name)
    if not line.startswith(tuple(NAMES.values())):
        line = line[:1].upper() + line[1:]
    return line if line.endswith((".", "?", "!")) else f"{line}."
