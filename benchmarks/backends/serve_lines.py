"""The process of a backend in an environment without FastGen: `benchmarks/processes.py` starts it with a script's path.

It reads lines of JSON: first the model and its inputs, then one line for each piece of work. The script's function
`load` gets the first line. It returns the version of its library, and a function that gets each further line and
returns the answer. Each answer is preceded by its seconds.

To generate, a line is {"new_tokens": number}, with "inputs" if they differ from those of the first line. The answer is
all tokens, as `generate` returns them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time


def main() -> None:
    # Output of libraries must not be mistaken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = None
    for line in sys.stdin:
        start = time.perf_counter()
        if work is None:
            answer, work = runpy.run_path(sys.argv[1])["load"](json.loads(line))
        else:
            answer = work(json.loads(line))
        print(json.dumps([time.perf_counter() - start, answer]), file=answers, flush=True)


if __name__ == "__main__":
    main()
