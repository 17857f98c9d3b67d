"""Names that a shell completes: of mechanisms and of tasks, several with commas between."""

from attngap.cli.facts import mechanism_names, task_names


def mechanisms(incomplete: str) -> list[str]:
    """`--mechanism elu,ga<TAB>` offers `elu,gated-delta`."""
    return several(incomplete, mechanism_names())


def tasks(incomplete: str) -> list[str]:
    return several(incomplete, task_names())


def several(incomplete: str, names: list[str]) -> list[str]:
    """
    >>> several("elu,g", ["elu", "gla", "gated-delta"])
    ['elu,gla', 'elu,gated-delta']
    """
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]
