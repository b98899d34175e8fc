"""These tests need FairSeq. Each starts with FastGen enabled and its counts at zero."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("fairseq") is None and not os.environ.get("FASTGEN_REQUIRE_FAIRSEQ"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def counted(counted: None) -> None:
    """In each test."""
