"""The process of a backend in an environment without FastGen: `elsewhere.py` starts it with the path of a script.

It reads lines of JSON: first the model and what to run it on, then what is to be done, as often as it is asked. The
script has a function `load`, which gets the first line and returns the version of its library, and a function that
gets each further line and returns the answer. To generate, that is how many new tokens, and all tokens, as `generate`
returns them.
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

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    asked = json.loads(sys.stdin.readline())
    version, work = runpy.run_path(sys.argv[1])["load"](asked)
    answer(version)
    for line in sys.stdin:
        answer(work(json.loads(line)))


if __name__ == "__main__":
    main()
