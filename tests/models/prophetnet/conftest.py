"""These tests need FairSeq. Each starts with FastGen enabled and its counts at zero."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

import fastgen

if importlib.util.find_spec("fairseq") is None and not os.environ.get("FASTGEN_REQUIRE_FAIRSEQ"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """FastGen is enabled, and its counts start at zero."""
    fastgen.enable()
    fastgen.reset_stats()
    yield
    fastgen.enable()


@pytest.fixture
def strict(counted: None) -> None:
    """A fallback fails the test."""
    fastgen.enable(strict=True)
