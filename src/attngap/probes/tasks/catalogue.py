"""The list of tasks; a new one is one file and one line here."""

from typing import Any

from attngap.probes.tasks.base import Task, build
from attngap.probes.tasks.copy import Copy
from attngap.probes.tasks.fuzzy_recall import FuzzyRecall
from attngap.probes.tasks.icl_regression import IclRegression
from attngap.probes.tasks.induction import Induction
from attngap.probes.tasks.mqar import Mqar
from attngap.probes.tasks.needle import Needle
from attngap.probes.tasks.selective_copy import SelectiveCopy
from attngap.probes.tasks.single_location import SingleLocation
from attngap.probes.tasks.text import Text

TASKS: tuple[type[Task], ...] = (
    Mqar,
    Copy,
    SelectiveCopy,
    Induction,
    Needle,
    IclRegression,
    SingleLocation,
    FuzzyRecall,
    Text,
)


def task(name: str, **options: Any) -> Task:
    """The task called `name`.

    >>> task("copy", items=8).tokens
    16
    """
    return build(TASKS, name, options)
