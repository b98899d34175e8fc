"""Parsers whose options are the fields of a class: what `fastgen.pipeline.settings.option` declares."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from fastgen_cli.shared import UsageError


class Parser(argparse.ArgumentParser):
    """Reports an error as one line, without a page of options above it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_options(parser: argparse.ArgumentParser, declared: type) -> None:
    """The options that the fields of a class declare. A destination is the name of a field."""
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
        if field.type == "bool":
            group.add_argument(*names, dest=field.name, action="store_true", help=about["help"])
            continue
        kind = _kind(field.name, str(field.type))
        metavar = {int: "N", float: "X"}.get(kind, field.name.split("_")[-1].upper())  # type: ignore[call-overload]
        group.add_argument(*names, dest=field.name, type=kind, metavar=metavar, help=about["help"])


def _kind(name: str, annotation: str) -> Callable[[str], Any]:
    """What turns the word on the command line into the value of a field."""
    if name == "batch_size":
        return _number_or_word
    if annotation.startswith("tuple"):
        return _listed
    return {"int": int, "float": float}.get(annotation.partition(" ")[0], str)


def _number_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())
