"""Parsers whose options are the fields of a class, as `fastgen.pipeline.settings.option` declares them."""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import fastgen
from fastgen import __version__
from fastgen_cli.shared import UsageError


class Parser(argparse.ArgumentParser):
    """Reports an error as one line, without the list of options above it. Its short help page omits rare options.

    Args:
        shows_all: whether its help page has all options, and the epilog.
    """

    generation: argparse._ArgumentGroup
    """The group of generation options, if the command has some."""

    def __init__(self, *, shows_all: bool, epilog: str, **options: Any) -> None:
        more = "More options, and what the formats, errors and resuming are like: --help-all"
        super().__init__(
            epilog=epilog if shows_all else more,
            formatter_class=_Formatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            **options,
        )
        self.shows_all = shows_all

    def about(self, help: str, is_rare: bool) -> str:
        """Returns the help of an option, or SUPPRESS if the help page omits it."""
        return help if self.shows_all or not is_rare else argparse.SUPPRESS

    def add_usual(self, build: Callable[[bool], Parser]) -> None:
        """Adds the options that every command has: help pages, the version, and shell completion."""
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")
        self.add_argument("--help-all", nargs=0, action=_HelpAll, build=build, help="this page, with all options")
        about = 'print what completes this command in a shell: eval "$(... --print-completion bash)"'
        self.add_argument("--print-completion", choices=_SHELLS, action=_Completion, build=build, help=about)

    def add_debug(self, group: argparse._ActionsContainer) -> None:
        group.add_argument(
            "--debug", action="store_true", help=self.about("show the traceback of an error", is_rare=True)
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


_SHELLS = ("bash", "zsh", "tcsh")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)


class _OfAllOptions(argparse.Action):
    """Prints something about all options, which `build(True)` makes a parser of, and ends the program."""

    def __init__(self, *args: Any, build: Callable[[bool], Parser], **options: Any) -> None:
        super().__init__(*args, **options)
        self._build = build


class _Completion(_OfAllOptions):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, *rest: Any) -> NoReturn:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab, which is not installed: pip install shtab")
        print(shtab.complete(self._build(True), shell=shell))
        parser.exit()


class _HelpAll(_OfAllOptions):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> NoReturn:
        self._build(True).print_help()
        parser.exit()


def data_parser(
    program: str,
    description: str,
    epilog: str,
    options: type,
    build: Callable[[bool], Parser],
    shows_all: bool,
    dtypes: Sequence[str] = (),
) -> Parser:
    """Builds the parser of a command over a data set. A destination is the name of a field of the options.

    Args:
        dtypes: those that also have an option of their own.
    """
    usage = "%(prog)s MODEL INPUT OUTPUT [options]"
    parser = Parser(prog=program, usage=usage, description=description, epilog=epilog, shows_all=shows_all)
    parser.add_argument("model", metavar="MODEL", help="directory written by save_pretrained, GGUF file, or hub name")
    parser.add_argument("input", metavar="INPUT", help="file, data set, or - for standard input")
    parser.add_argument("output", metavar="OUTPUT", help="file, or - for standard output")
    parser.add_usual(build)
    add_options(parser, options)
    group = parser.add_argument_group("FastGen")
    group.add_argument("--no-fastgen", action="store_true", help="run the library's own code, for comparison")
    for dtype in dtypes:
        about = parser.about(f"the same as --dtype {dtype}", is_rare=True)
        group.add_argument(f"--{dtype}", dest="dtype", action="store_const", const=dtype, help=about)
    parser.add_debug(group)
    return parser


def of_the_run(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the run's options of `data_parser`'s command line. Disables FastGen if that asks for it."""
    given.pop("debug", None)
    if given.pop("no_fastgen", False):
        fastgen.disable()
    return given


def add_options(parser: Parser, declared: type) -> None:
    """Adds the options that the fields of a class declare. A destination is the name of a field."""
    groups: dict[str, Any] = {}
    group: Any = parser
    for field in dataclasses.fields(declared):
        about = field.metadata
        if not about:
            continue
        if title := about["group"]:
            group = groups.get(title) or parser.add_argument_group(title)
            groups[title] = group
        names = ["--" + field.name.replace("_", "-"), *about["aliases"]]
        said = parser.about(about["help"], about["rare"])
        if field.type == "bool":
            group.add_argument(*names, dest=field.name, action="store_true", help=said)
            continue
        kind = _kind(field.name, str(field.type))
        metavar = {int: "N", float: "X"}.get(kind, field.name.split("_")[-1].upper())  # type: ignore[call-overload]
        group.add_argument(*names, dest=field.name, type=kind, metavar=metavar, help=said)


def _kind(name: str, annotation: str) -> Callable[[str], Any]:
    """Returns the function that converts a command-line word to a field's value."""
    if name == "batch_size":
        return _number_or_word
    if name == "keep":
        return _names
    if annotation.startswith("tuple"):
        return _listed
    return {"int": int, "float": float}.get(annotation.partition(" ")[0], str)


def _number_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _names(text: str) -> tuple[str, ...]:
    """Parses names of columns, which may contain spaces; a name with a comma is quoted, as in a CSV file."""
    return tuple(name for name in next(csv.reader([text], skipinitialspace=True), []) if name)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())
