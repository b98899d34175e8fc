"""`python -m benchmarks.serving NAME [options]`: runs a benchmark, prints its tables and writes them to `--out`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import ROOT, machine
from benchmarks.serving import overload, report, schedulers, streams, translation

# Each has `add_options`; `measured`, which yields rows; `COLUMNS`, the titles of the columns; and optionally `compare`,
# which gets all rows so far and adds comparisons to them.
BENCHMARKS = {"schedulers": schedulers, "translation": translation, "streams": streams, "overload": overload}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    benchmark, rows = BENCHMARKS[options.benchmark], list[report.Row]()
    out = options.out or _results()
    with tempfile.TemporaryDirectory() as temporary:
        for row in benchmark.measured(options, Path(temporary)):
            rows.append(row)
            if hasattr(benchmark, "compare"):
                benchmark.compare(rows)
            print(report.shown([row], benchmark.COLUMNS), flush=True)
            report.write(out, options.benchmark, rows, report.shown(rows, benchmark.COLUMNS))
    if benchmark is schedulers:
        schedulers.write_summary(out, rows)
    return 0


def _results() -> Path:
    slug = machine.slug(machine.describe_machine(torch.device("cpu")))
    return ROOT / "benchmarks" / "results" / slug / "serving"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, module in BENCHMARKS.items():
        about = (module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=about, description=module.__doc__, formatter_class=form)
        command.add_argument("--seconds", type=float, default=60.0, help="of each load (default: 60)")
        command.add_argument("--out", type=Path, metavar="FOLDER", help="of tables and pictures")
        module.add_options(command)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
