"""What `fastgen-embed` and `fastgen-classify` have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastgen.counters import ENCODER
from fastgen_cli.options import Parser, add_options
from fastgen_cli.over_data import ended, run_over_data
from fastgen_cli.shared import allow_interrupts, interrupts_end, renamed, reported, standard_streams

if TYPE_CHECKING:
    from fastgen.pipeline.encoding.options import EncodeOptions

_EPILOG = """\
inputs:   .txt (or any other name): a text a line; .jsonl, .csv, .tsv, .parquet: --input-column; the name of a data set
          or the directory of a saved one; - is standard input (lines of text)
cutting:  inputs that are longer than the model takes are cut, and how many is said at the end
errors:   bad records (empty, no string, invalid UTF-8, a row of a damaged file, missing column, refused by the model)
          are reported with their line number in OUTPUT.errors.jsonl and skipped, unless --strict
resuming: work is kept in OUTPUT.partial until the output is complete; after an interrupt or a kill the same command
          with --resume continues, and ends in the same file as a run that was not interrupted
repeating: batches depend on the input and the options alone, and the same command gives the same output
status:   0 all records done, 1 some were skipped, 2 the run could not be done, 130 interrupted
"""


@dataclass(frozen=True)
class Command:
    """One of the two commands."""

    program: str
    description: str
    outputs: str
    """What is written, for the page of help."""
    options: type[EncodeOptions]
    run: Callable[..., Any]


def build_parser(command: Command, shows_all: bool = False) -> Parser:
    """The parser. A destination is a field of the command's options."""
    from fastgen import __version__

    parser = Parser(
        prog=command.program,
        usage="%(prog)s MODEL INPUT OUTPUT [options]",
        description=command.description,
        epilog=command.outputs + _EPILOG,
        shows_all=shows_all,
    )
    parser.add_argument("model", metavar="MODEL", help="directory written by save_pretrained, GGUF file, or hub name")
    parser.add_argument("input", metavar="INPUT", help="file, data set, or - for standard input")
    parser.add_argument("output", metavar="OUTPUT", help="file, or - for standard output")
    parser.add_usual(command.program, partial(build_parser, command), __version__)
    add_options(parser, command.options)
    group = parser.add_argument_group("FastGen")
    group.add_argument("--no-fastgen", action="store_true", help="run the library's own code, for comparison")
    group.add_argument(
        "--debug", action="store_true", help=parser.about("show the traceback of an error", is_rare=True)
    )
    return parser


def run_command(command: Command, arguments: Sequence[str] | None) -> int:
    """The command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    with standard_streams(), interrupts_end(command.program):
        return reported(command.program, lambda: _run(command, words), debug="--debug" in words)


def _run(command: Command, words: Sequence[str]) -> int:
    import fastgen

    given = vars(build_parser(command).parse_args(renamed(command.program, words)))
    given.pop("debug", None)
    if given.pop("no_fastgen", False):
        fastgen.disable()
    settings = command.options(**given)
    report = run_over_data(command.program, words, settings, lambda: command.run(settings, begins=allow_interrupts))
    if report.truncated:
        print(
            f"{command.program}: {report.truncated} of {report.samples} inputs were cut: see --max-length",
            file=sys.stderr,
        )
    return ended(command.program, report, settings, ENCODER)
