"""The same prompt, continued by both models, and where they part."""

import itertools

from attngap.report.page import Block, Section, Text
from attngap.report.results import Results


def sample_sections(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for result in results.of("samples"):
        texts: dict[str, str] = result.content["texts"]
        blocks.append(Text([f"{result.content['prompt']} >>>"], "pre"))
        for name, text in texts.items():
            blocks += [Text([f"{name[0].upper()}{name[1:]}:"]), Text([text], "pre")]
        blocks.append(Text([parting(list(texts.values()))]))
    lead = "Both continue the same prompt and take the likeliest token every time; >>> is where the prompt ends."
    return [Section("samples", "In its own words", blocks, lead)] if blocks else []


def parting(texts: list[str]) -> str:
    """Where the continuations first differ.

    >>> parting(["the cat sat on a mat", "the cat sat on the mat"])
    'They agree up to "the cat sat on" and part there.'
    """
    if len(set(texts)) == 1:
        return "Both wrote the same."
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    common = "".join(letters[0] for letters in same).rpartition(" ")[0].strip()
    return f'They agree up to "{common}" and part there.' if common else "They part at the first word."
