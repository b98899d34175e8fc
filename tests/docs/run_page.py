"""Runs the blocks of a page in order: `python -m tests.docs.run_page PAGE < blocks.json`.

Shell blocks are run by bash, which stops at the first command that fails. Python blocks share their variables. Both
run in the current folder. What a block prints on standard output must be what the page shows, if it shows it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import traceback
from typing import Any

from fastgen import comparison


def main(page: str, blocks: list[dict[str, Any]]) -> int:
    comparison._LATER = 1  # times are not compared: `fastgen.compare` need not repeat calls for them
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        where = f"{page}:{block['line']}"
        # As many empty lines in front as the page has, so that a traceback names its line.
        printed = (
            run_python(page, "\n" * (block["line"] - 1) + block["text"], names)
            if block["language"] == "python"
            else run_shell(block["text"])
        )
        if printed is None:
            print(f"{where}: this block fails", file=sys.stderr)
            return 1
        print(printed, end="", flush=True)
        if block["output"] is not None and not is_shown(block["output"], printed):
            print(f"{where}: this block prints\n{printed}\nand the page shows\n{block['output']}", file=sys.stderr)
            return 1
    return 0


def run_python(page: str, text: str, names: dict[str, Any]) -> str | None:
    """What the block prints, or None where it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(text, page, "exec"), names)
        except BaseException:
            traceback.print_exc()
            return None
    return printed.getvalue()


def run_shell(text: str) -> str | None:
    """What the commands print, or None where one fails."""
    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", text], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{done.stdout}\nexit status {done.returncode}", file=sys.stderr)
        return None
    return done.stdout


# `fastgen.compare` says so where other work on the machine leaves it no time to make enough calls.
_ON_BUSY_MACHINES = re.compile(r"^steps were still being captured.*\n", re.MULTILINE)


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed.

    `...` stands for anything, and a number with a decimal point for any such number: times differ from run to run.
    Spaces and line breaks count as one space.
    """
    pattern = ""
    for part in re.findall(r"\.\.\.|\d+\.\d+|\s+|[^\s.\d]+|.", shown.strip()):
        if part == "...":
            pattern += ".*?"
        elif re.fullmatch(r"\d+\.\d+", part):
            pattern += r"\d+\.\d+"
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    return re.fullmatch(pattern, _ON_BUSY_MACHINES.sub("", printed).strip(), re.DOTALL) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.load(sys.stdin)))
