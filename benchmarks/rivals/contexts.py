"""Contexts and questions as plain tokens, so that every method, in whatever environment, reads the same."""

import argparse
import json
import random
from pathlib import Path

from asking import CONTEXTS, read_lines

CONTINUED = 129  # tokens of real text after a context: the first is given, the others are predicted
NEEDLES = 6
DEPTHS = (0.1, 0.5, 0.9)  # of the single needle, in turn
KINDS = ("text", "lookup", "repetition")


def prepare(options: argparse.Namespace) -> None:
    """Write the model as a plain folder and the contexts; those that are there already stay as they are."""
    import attngap

    model, tokenizer = attngap.load(options.model)
    _check_lengths(model, options.lengths)
    folder = options.output / "model"
    if not folder.exists():
        model.save_pretrained(folder)
        tokenizer.chat_template = None  # contexts are plain text; KVzip would look for the template's tokens in them
        tokenizer.save_pretrained(folder)
    texts = [path.read_text(encoding="utf-8") for path in options.text]
    path = options.output / CONTEXTS
    done = {(row["kind"], row["length"], row["example"]) for row in read_lines(path)}
    with path.open("a", encoding="utf-8") as file:
        for length in options.lengths:
            for kind in KINDS:
                for i in range(options.examples if kind == "text" else max(1, options.examples // 2)):
                    if (kind, length, i) not in done:
                        row = make(kind, tokenizer, texts[i % len(texts)], length, i)
                        file.write(json.dumps(row) + "\n")


def _check_lengths(model, lengths: list[int]) -> None:
    from attngap.errors import AttngapError

    most = model.config.max_position_embeddings
    for length in lengths:
        if length > most:
            raise AttngapError(f"A length of {length} is beyond this model's {most} positions. Give a shorter one")


def make(kind: str, tokenizer, text: str, length: int, example: int) -> dict:
    """One context and its questions: a task's name, what is asked, and the tokens that answer."""
    from attngap.longcontext.suite import make as from_suite
    from attngap.longcontext.tasks import task
    from attngap.longcontext.writing import Writer

    seed = f"rivals/{kind}/{length}/{example}"
    if kind == "text":
        context, questions = woven(Writer(tokenizer, text, length, random.Random(seed)), example)
    else:
        made = from_suite(task(kind), tokenizer, text, length, seed)
        context, questions = made.context[0].tolist(), [(kind, *_plain(q)) for q in made.questions]
    return {"kind": kind, "length": length, "example": example, "context": context, "questions": questions}


def woven(w, example: int) -> tuple[list[int], list[tuple[str, list[int], list[int]]]]:
    """Real text with a code, the numbers of some places and a passage to remember, and the text that follows it."""
    from attngap.longcontext.tasks import COPIED, HINT, PLACES, spaced_out
    from attngap.longcontext.writing import Question

    code, pairs = w.number(), [(place, w.number()) for place in w.rng.sample(PLACES, NEEDLES)]
    said = [(DEPTHS[example % len(DEPTHS)], f"\n\nRemember: the pass code is {code}.\n\n")]
    said += spaced_out(w, [f"\n\nRemember: the secret number of {place} is {number}.\n\n" for place, number in pairs])
    lines = w.filler(COPIED + HINT)
    copied = w.encode("\n\nHere is a passage to remember:\n") + lines + w.encode("\n\n")
    again = w.encode("\n\nHere is the passage to remember once more:\n") + lines[:HINT]
    pieces = [*((depth, w.encode(text)) for depth, text in said), (w.rng.random() / 2, copied)]
    questions = [("needle", *_plain(w.question("\n\nQuestion: what is the pass code? The pass code is", code)))]
    for place, number in pairs:
        asked = w.question(
            f"\n\nQuestion: what is the secret number of {place}? The secret number of {place} is", number
        )
        questions.append(("needles", *_plain(asked)))
    questions.append(("copying", again, lines[HINT:]))
    # The last tokens of what is woven follow the context, so nothing is said there.
    before = 1 - CONTINUED / (w.length - sum(len(piece) for _, piece in pieces))
    woven = w.weave_tokens([(depth * before, piece) for depth, piece in pieces], [Question((), ())]).context[0].tolist()
    body, follows = woven[:-CONTINUED], woven[-CONTINUED:]
    return body, [("text", follows[:1], follows[1:]), *questions]


def _plain(question) -> tuple[list[int], list[int]]:
    return list(question.ask), list(question.answer)


def contexts(folder: Path) -> list[dict]:
    return read_lines(folder / CONTEXTS)


def wanted(options: argparse.Namespace) -> list[dict]:
    """The contexts to ask about, the first of every length before the second of any; a length without some is named."""
    rows = contexts(options.output)
    for length in sorted(set(options.lengths) - {row["length"] for row in rows}):
        print(f"No context of {length} tokens is there. python benchmarks/rivals prepare --lengths {length} makes some")
    asked = [row for row in rows if row["example"] < options.examples and row["kind"] in options.kinds]
    asked = [row for row in asked if row["length"] in options.lengths]
    return sorted(asked, key=lambda row: (row["example"], options.lengths.index(row["length"])))
