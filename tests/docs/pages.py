"""The pages of the documentation, taken apart into their fenced blocks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")),
        *(ROOT / "docs").glob("*.md"),
    ]
)
# The first line of a block that shows what the block in front of it prints. The site shows the title.
OUTPUT = 'text title="Output"'
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


@dataclass(frozen=True)
class Block:
    """What stands between two fences. `line` is that of its first line in the page, counted from 1."""

    language: str
    line: int
    text: str
    output: str | None = None
    """What the block prints: the text of the `text` block titled "Output" behind it, or None if there is none."""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order, but for outputs, which belong to the block in front of them."""
    found: list[Block] = []
    inside: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if inside is None:
                inside, language, start = [], line[3:].strip(), number + 1
            elif language == OUTPUT:
                assert found, f"{page}: the output at line {start} is that of no block"
                found[-1] = replace(found[-1], output="\n".join(inside) + "\n")
                inside = None
            else:
                found.append(Block(language, start, "\n".join(inside) + "\n"))
                inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}: the block at line {start} has no end"
    return found


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block: lines that end in a backslash are joined, comments and empty lines left out."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        command = line.partition(" #")[0].strip()
        if command and not command.startswith("#"):
            yield command
