"""`python -m fastgen` says whether this installation accelerates, on which instruction set, with which releases.

`--verbose` lists every patch and every operator. Exit status: 0 where it accelerates, 1 where it does not.
"""

import argparse
import sys

import fastgen
from fastgen import selfcheck

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m fastgen", description="Says whether this installation of FastGen accelerates, or why not."
    )
    parser.add_argument("--verbose", action="store_true", help="list every patch and every operator")
    verbose = parser.parse_args().verbose
    # The check imports Transformers, so that patches are applied: the status shows whether they fit.
    line, accelerates = selfcheck.line()
    status = fastgen.status()
    print(line, status if verbose else f"{status.summary()}\n\nEach patch and operator: --verbose", sep="\n\n")
    sys.exit(not accelerates)
