"""`python -m benchmarks.serving NAME [options]`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.serving import overload, schedulers, streams, translation

BENCHMARKS = {"schedulers": schedulers, "translation": translation, "streams": streams, "overload": overload}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of them, prints its tables and writes them to `--out`."""
    options = _parser().parse_args(arguments)
    options.out = options.out or _results()
    with tempfile.TemporaryDirectory() as temporary:
        BENCHMARKS[options.benchmark].run_all(options, Path(temporary))
    return 0


def _results() -> Path:
    slug = machine.slug(machine.describe_machine(torch.device("cpu")))
    return machine.ROOT / "benchmarks" / "results" / slug / "serving"


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
