"""`python -m fastgen` tells whether this installation accelerates, on which instruction set, with which releases.

`--verbose` lists every patch and every operator. The exit status is 0 if it accelerates, and 1 if it does not.

`python -m fastgen tune` measures which kernel of a linear layer is the fastest on this machine for each number of rows,
and writes a profile that replaces the shipped table (`fastgen.ops.linear.choose`).
"""

import argparse
import sys

import fastgen
from fastgen import report

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m fastgen", description="Says whether this installation of FastGen accelerates, or why not."
    )
    parser.add_argument("--verbose", action="store_true", help="list every patch and every operator")
    commands = parser.add_subparsers(dest="command", metavar="{tune}")
    commands.add_parser("tune", help="measure the kernels of linear layers, and write a profile of this machine")
    given = parser.parse_args()
    if given.command == "tune":
        from fastgen.ops.linear import tune

        sys.exit(tune.main())
    verbose = given.verbose
    # The check imports Transformers, which applies the patches: the status then shows whether they fit.
    line, accelerates = report.line()
    status = fastgen.status()
    print(line, status if verbose else f"{status.summary()}\n\nEach patch and operator: --verbose", sep="\n\n")
    sys.exit(not accelerates)
