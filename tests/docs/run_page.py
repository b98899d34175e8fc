"""Runs the blocks of a page in order: `python -m tests.docs.run_page PAGE < blocks.json`.

Shell blocks are run by bash, which stops at the first command that fails. Python blocks share their variables. Both
run in the current folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from typing import Any


def main(page: str, blocks: list[dict[str, Any]]) -> int:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        where = f"{page}:{block['line']}"
        if block["language"] == "python":
            try:
                # As many empty lines in front as the page has, so that a traceback names its line.
                exec(compile("\n" * (block["line"] - 1) + block["text"], page, "exec"), names)
            except BaseException:
                traceback.print_exc()
                print(f"{where}: this block fails", file=sys.stderr)
                return 1
        else:
            sys.stdout.flush()
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", block["text"]])
            if done.returncode != 0:
                print(f"{where}: this block ends with exit status {done.returncode}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.load(sys.stdin)))
