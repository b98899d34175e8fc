"""Tiny models, made once for all tests of the pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline import tiny


@pytest.fixture(scope="session")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join(tiny.sentences(40)) + "\n")
    return path
