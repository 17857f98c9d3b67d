"""The README as a package index shows it: links into this folder become names of files, for nothing lies beside it."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

SAID_OTHERWISE = {
    "in a clone of this repository": "in the unpacked source distribution",
    '`pip install ".[demo]"`': '`pip install "attngap[demo]"`',
    "`pip install .`": "`pip install attngap`",
}
WHERE = "\nFiles named here, `docs/` among them, are in the source distribution.\n"


def standalone(readme: str) -> str:
    """Without what only works beside the sources: pictures and links by relative path, commands for this folder."""
    text = re.sub(r"^!\[[^\]]*\]\((?!https:)[^)]*\)\n\n", "", readme, flags=re.MULTILINE)
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https:)([^)#]+)[^)]*\)", _named, text)
    for here, there in SAID_OTHERWISE.items():
        if here not in text:
            raise ValueError(f"README.md no longer says {here!r}: mend SAID_OTHERWISE in hatch_build.py")
        text = text.replace(here, there)
    return text + WHERE


def _named(link: re.Match) -> str:
    words, target = link.groups()
    return f"`{target}`" if words == target else f"{words}: `{target}`"


class Readme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = standalone((Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
