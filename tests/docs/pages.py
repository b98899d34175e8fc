"""The pages of the documentation, taken apart: their fenced blocks and their paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")),
        *(ROOT / "docs").glob("*.md"),
    ]
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


@dataclass(frozen=True)
class Block:
    """What stands between two fences. `line` is that of its first line in the page, counted from 1."""

    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    inside: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if inside is None:
                inside, language, start = [], line[3:].strip(), number + 1
            else:
                found.append(Block(language, start, "\n".join(inside) + "\n"))
                inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}: the block at line {start} has no end"
    return found


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block: lines that end in a backslash are joined, comments and empty lines left out."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        command = line.partition(" #")[0].strip()
        if command and not command.startswith("#"):
            yield command


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and rows of tables, each with the number of its first line. Code is left out."""
    fenced = False
    start, words = 0, []
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        item = re.match(r"\s*([-*+]|\d+\.|\||#|!!!)", line) is not None
        if words and (fence or fenced or item or not line.strip()):
            yield start, " ".join(words)
            words = []
        if not (fence or fenced) and line.strip():
            start = start if words else number
            words += line.split()
