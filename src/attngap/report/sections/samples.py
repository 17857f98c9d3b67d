"""The same prompt, continued by both models, and where they part."""

import itertools

from attngap.report.page import Block, Section, SideBySide, Text
from attngap.report.results import Results


def sample_sections(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for result in results.of("samples"):
        texts: dict[str, str] = {name: text.lstrip() for name, text in result.content["texts"].items()}
        blocks.append(Text([f"{result.content['prompt']} >>>"], "pre"))
        titles = {f"{name[0].upper()}{name[1:]}": text for name, text in texts.items()}
        blocks += [SideBySide(titles, common(list(texts.values()))), Text([parting(list(texts.values()))])]
    lead = "Both continue the same prompt and take the likeliest token every time; >>> is where the prompt ends."
    lead += " What is marked differs."
    return [Section("samples", "In its own words", blocks, lead)] if blocks else []


def parting(texts: list[str]) -> str:
    """Where the continuations first differ.

    >>> parting(["the cat sat on a mat", "the cat sat on the mat"])
    'They agree up to "the cat sat on" and part there.'
    """
    if len(set(texts)) == 1:
        return "Both wrote the same."
    same = texts[0][: common(texts)].strip()
    return f'They agree up to "{same}" and part there.' if same else "They part at the first word."


def common(texts: list[str]) -> int:
    """How many letters, in whole words, all of them begin with.

    >>> common(["a cat", "a cow"])
    1
    """
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    start = "".join(letters[0] for letters in same)
    return len(start) if len(set(texts)) == 1 else max(start.rfind(" "), 0)
