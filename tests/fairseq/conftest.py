"""FairSeq's tests need FairSeq; everything else does without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import pytest

from fastgen.decoding.kv import growing as kv

try:
    VERSION: str | None = metadata.version("fairseq")
except metadata.PackageNotFoundError:
    try:
        VERSION = metadata.version("fairseq-fixed")
    except metadata.PackageNotFoundError:
        VERSION = None

if VERSION is None and not os.environ.get("FASTGEN_REQUIRE_FAIRSEQ"):
    collect_ignore_glob = ["test_*.py", "commands/test_*.py"]


def pytest_report_header() -> str:
    return f"fairseq: {VERSION or 'not installed, its tests are left out'}"


@pytest.fixture(scope="session", autouse=True)
def options_are_parsed_once() -> Iterator[None]:
    """FairSeq has Hydra parse 300 options for every command, nearly all of them defaults."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse, parsed = OverridesParser.parse_override, dict[str, Any]()

    def parse_once(parser: OverridesParser, text: str) -> Any:
        if text not in parsed:
            parsed[text] = parse(parser, text)
        return parsed[text]

    with mock.patch.object(OverridesParser, "parse_override", parse_once):
        yield


@pytest.fixture(autouse=True)
def arguments_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """FairSeq's commands read them from there."""
    monkeypatch.setattr(sys, "argv", sys.argv)


@pytest.fixture(autouse=True)
def counted(counted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is shared however few bytes it has: that of a tiny model would never be worth it."""
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(kv, "MIN_TABLE_BYTES", 0)
