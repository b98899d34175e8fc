"""Tiny models, made once for all tests of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.ops import gpu
from tests.pipeline import tiny


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and far slower where others want the cores as well."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are programs, as for users: the tests have Triton's kernels interpreted otherwise."""
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)


@pytest.fixture(scope="session")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def unilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.unilm(tmp_path_factory.mktemp("unilm"))


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join(tiny.sentences(40)) + "\n")
    return path
