"""The same prompt, continued by both models."""

from attngap.report.page import Block, Section, Text
from attngap.report.results import Results


def sample_sections(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for result in results.of("samples"):
        prompt = result.content["prompt"]
        blocks += [
            block
            for name, text in result.content["texts"].items()
            for block in (Text([f"{name[0].upper()}{name[1:]}:"]), Text([f"{prompt} >>> {text}"], "pre"))
        ]
    lead = "Each takes the likeliest token every time; >>> is where the prompt ends."
    return [Section("samples", "In its own words", blocks, lead)] if blocks else []
