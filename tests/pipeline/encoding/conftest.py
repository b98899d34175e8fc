"""Tiny models that only encode."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pipeline import tiny
from tests.pipeline.conftest import inputs, one_thread

__all__ = ["inputs", "one_thread"]


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("classifier"), labels=3)


@pytest.fixture
def fresh(bert: Path, tmp_path: Path) -> Path:
    """A model of which a test may change the files."""
    return Path(shutil.copytree(bert, tmp_path / "model"))
