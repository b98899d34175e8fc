"""The process of a backend in an environment without FastGen: `elsewhere.py` starts it with the path of a script.

It reads lines of JSON: first the model and what to run it on, then what is to be done, as often as it is asked. The
script has a function `load`, which gets the first line and returns the version of its library, and a function that
gets each further line and returns the answer. Each answer goes back behind the seconds that it took.

To generate, a line is {"new_tokens": how many}, with "inputs" where they are not those of the first line. The answer is
all tokens, as `generate` returns them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(seconds: float, value: Any) -> None:
        print(json.dumps([seconds, value]), file=answers, flush=True)

    (version, work), seconds = _timed(runpy.run_path(sys.argv[1])["load"], json.loads(sys.stdin.readline()))
    answer(seconds, version)
    for line in sys.stdin:
        value, seconds = _timed(work, json.loads(line))
        answer(seconds, value)


def _timed(work: Callable[[Any], Any], asked: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    value = work(asked)
    return value, time.perf_counter() - start


if __name__ == "__main__":
    main()
