"""The process of a backend in an environment without FastGen: `elsewhere.py` starts it with the path of a script.

It reads lines of JSON: first the model and what to generate from, then how many tokens, as often as it is asked. The
script has a function `load`, which gets the first line and returns the version of its library, and a function that
generates as many new tokens as it is told and returns all tokens, as `generate` does.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def main() -> None:
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    asked = json.loads(sys.stdin.readline())
    version, generate = runpy.run_path(sys.argv[1])["load"](asked)
    answer(version=version)
    for line in sys.stdin:
        answer(tokens=generate(json.loads(line)["new_tokens"]))


if __name__ == "__main__":
    main()
