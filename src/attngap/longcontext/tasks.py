"""The tasks, in the style of RULER (arXiv 2404.06654) and scaled down, so that small models solve the easier half."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence

from attngap.errors import AttngapError, unknown
from attngap.longcontext.writing import Example, Question, Writer

PLACES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Athens", "Dublin", "Oslo", "Cairo", "Tokyo")
COPIED = 32  # tokens that are asked for again, verbatim
HINT = 8  # tokens before them that are given
LIBRARY = (
    *("builtins", "math", "os", "os.path", "shutil", "random", "statistics", "itertools", "functools", "collections"),
    *("inspect", "ast", "re", "json", "csv", "time", "datetime", "socket", "threading", "subprocess", "string"),
    *("heapq", "bisect", "textwrap", "pathlib", "tarfile", "zipfile", "logging", "email.utils", "urllib.parse"),
)
HOPS = 2  # assignments between a variable and its number


@dataclasses.dataclass(frozen=True)
class Task:
    """`build` makes one example; everything random in it comes from the writer's generator."""

    name: str
    about: str
    build: Callable[[Writer], Example]


def needle(w: Writer) -> Example:
    number = w.number()
    question = w.question("\n\nQuestion: what is the secret number? The secret number is", number)
    return w.weave([(w.rng.random(), f"\n\nRemember: the secret number is {number}.\n\n")], [question])


def needles(w: Writer) -> Example:
    pairs = [(place, w.number()) for place in w.rng.sample(PLACES, 4)]
    said = [f"\n\nRemember: the secret number of {place} is {number}.\n\n" for place, number in pairs]
    questions = [
        w.question(f"\n\nQuestion: what is the secret number of {place}? The secret number of {place} is", number)
        for place, number in pairs
    ]
    return w.weave(spaced_out(w, said), questions)


def values(w: Writer) -> Example:
    place, numbers = w.rng.choice(PLACES), [w.number() for _ in range(3)]
    said = [f"\n\nRemember: one of the secret numbers of {place} is {number}.\n\n" for number in numbers]
    ask = f"\n\nQuestion: what are all the secret numbers of {place}, in order? The secret numbers of {place} are"
    return w.weave(spaced_out(w, said), [w.question(ask, ", ".join(numbers))])


def lookup(w: Writer) -> Example:
    """Nothing but keys and values: the probe that retrieval heads are found by (arXiv 2602.11374)."""
    keys = w.pick_words(min(len(w.words), max(8, w.length // 8)))
    pairs = [(key, w.number()) for key in keys]
    return w.fill([(f"{key}: {number}\n", w.question(f"\n{key}:", number)) for key, number in pairs])


def tracking(w: Writer) -> Example:
    """The number of a variable that was set by way of others, beside a second such chain."""
    names = w.pick_words(2 * (HOPS + 1))
    chains = [(names[i::2], w.number()) for i in range(2)]
    said = [f"\n\nRemember: the number {chain[0]} is {number}.\n\n" for chain, number in chains]
    for hop in range(HOPS):
        said += [f"\n\nRemember: the number {c[hop + 1]} is equal to the number {c[hop]}.\n\n" for c, _ in chains]
    questions = [w.question(f"\n\nQuestion: what is the number {c[-1]}? The number is", n) for c, n in chains]
    return w.weave(spaced_out(w, said), questions)


def repetition(w: Writer) -> Example:
    """Random tokens a second time, all but the last few of them given again: half the length lies between."""
    period = (w.length - len(w.prefix)) // 2
    if period <= COPIED:
        raise AttngapError(f"Repetition needs a length of at least {2 * COPIED + 2 + len(w.prefix)}, got {w.length}")
    special = set(w.tokenizer.all_special_ids)
    ordinary = [i for i in range(len(w.tokenizer)) if i not in special]
    once = w.rng.sample(ordinary, period) if period <= len(ordinary) else w.rng.choices(ordinary, k=period)
    question = Question(tuple(once[-COPIED - HINT : -COPIED]), tuple(once[-COPIED:]))
    return w.example(once + once[: -COPIED - HINT], [question])


def copying(w: Writer) -> Example:
    """Real text from far back, word by word, after its first words."""
    lines = w.filler(COPIED + HINT)
    marked = w.encode("\n\nHere is a passage to remember:\n") + lines + w.encode("\n\n")
    ask = w.encode("\n\nHere is the passage to remember once more:\n") + lines[:HINT]
    question = Question(tuple(ask), tuple(lines[HINT:]))
    return w.weave_tokens([(w.rng.random() / 2, marked)], [question])


def dictionary(w: Writer) -> Example:
    """Numbered entries of a real dictionary, the functions of Python's own library, in random order."""
    found = entries()
    chosen = w.rng.sample(found, len(found))
    records = []
    for name, about in chosen:
        number = w.number(4)
        records.append((f"No. {number}: {name}. {about}\n", w.question(f"\n{name}. {about} This is entry No.", number)))
    return w.fill(records)


def frequent(w: Writer) -> Example:
    """A list of words in which one comes ten times as often as any other."""
    often, *others = w.pick_words(33)
    question = w.question("\n\nThe word that comes most often in the list above is:", often)
    weights = [10, *(1 for _ in others)]
    lines = w.rng.choices([often, *others], weights, k=w.length)
    body: list[int] = []
    room = w.room([question])
    for word in lines:
        tokens = w.encode(f" {word}")
        if len(body) + len(tokens) > room:
            break
        body += tokens
    return w.example(body, [question])


def spaced_out(w: Writer, statements: Sequence[str]) -> list[tuple[float, str]]:
    """Each statement somewhere in its own part of the context, in the given order."""
    return [((i + w.rng.random()) / len(statements), text) for i, text in enumerate(statements)]


@functools.cache
def entries() -> list[tuple[str, str]]:
    """Names and first sentences of what Python's library documents; there is such a dictionary on every machine."""
    found = {}
    for module in map(importlib.import_module, LIBRARY):
        for name, thing in inspect.getmembers(module, callable):
            first = (inspect.getdoc(thing) or "").split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".")
            if not name.startswith("_") and 20 <= len(first) <= 120 and "->" not in first:
                found.setdefault(name, f"{first}.")
    return sorted(found.items())


TASKS = (
    Task("needle", "one number hidden in text", needle),
    Task("needles", "one of four numbers hidden in text, by its key", needles),
    Task("values", "all three numbers of one key, in order", values),
    Task("lookup", "the value of a key, in a context of nothing else", lookup),
    Task("tracking", "a number by way of two variables", tracking),
    Task("repetition", "a random sequence, half the length ago", repetition),
    Task("copying", "a passage of real text, word by word", copying),
    Task("dictionary", "the number of an entry of a real dictionary", dictionary),
    Task("frequent", "the most frequent word of a list", frequent),
)


def task(name: str) -> Task:
    found = {each.name: each for each in TASKS}
    if name not in found:
        raise unknown("long-context task", name, tuple(found))
    return found[name]
