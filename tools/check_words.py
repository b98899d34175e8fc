"""Refuses words that have a better one: `make lint` runs it over code, messages and pages.

    python tools/check_words.py [FILE ...]   # all tracked files without arguments; exit status 1 where it finds one

Only words that mean nothing else here are in the table. The field's word stands beside each.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENDINGS = (".py", ".cpp", ".h", ".cu", ".md", ".toml", ".yml", "Makefile")
# By the word as it would be written, the one to use.
WORDS = {
    r"tier ?[12]": "hooks, captured step",
    r"(?:first|prompt) pass(?:es)?\b": "prefill",
    r"matrix[ _]registers?": "AMX tiles",
    r"as_they_are\(": "plain_linear",
    r"in_force\(": "override_attention",
    r"narrow_weights\.left_out": "suspended",
    r"best_two": "top_two",
    r"is_spoilt": "has_nan",
    r"settings as switches": "process_settings",
    r"Computed\[": "BatchResult",
}
_PATTERN = re.compile(rf"(?<![\w])(?:{'|'.join(WORDS)})", re.IGNORECASE)


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word and the better word of each in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _PATTERN.finditer(line):
            better = next(word for pattern, word in WORDS.items() if re.fullmatch(pattern, match[0], re.IGNORECASE))
            yield number, match[0], better


def tracked() -> list[Path]:
    """The files that git knows, but for this one and its test."""
    said = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = {"tools/check_words.py", "tests/test_words.py"}
    return [ROOT / name for name in said.splitlines() if name.endswith(ENDINGS) and name not in own]


def main(arguments: Sequence[str] | None = None) -> int:
    given = [Path(name) for name in (sys.argv[1:] if arguments is None else arguments)] or tracked()
    lines = [
        f"{path}:{number}: say {better} in place of {word!r}"
        for path in given
        if path.is_file()
        for number, word, better in found_in(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(lines), end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
