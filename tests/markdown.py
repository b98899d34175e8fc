"""Tables of reports and of docs/support.md."""

from __future__ import annotations

from collections.abc import Iterable


def table(header: list[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in lines)
