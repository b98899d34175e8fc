"""The tiny models of the pipeline's tests, and the commands' one line of an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import fastgen
from tests.pipeline.conftest import bart, gpt2, inputs, one_thread, unilm
from tests.pipeline.quantizing.conftest import pairs

__all__ = ["bart", "gpt2", "inputs", "one_thread", "pairs", "unilm"]


@pytest.fixture(autouse=True)
def patches_as_before() -> Iterator[None]:
    yield
    fastgen.enable()


@pytest.fixture(autouse=True)
def the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no connection, but that this is found at once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def one_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed on standard error, which must be one line."""

    def read() -> str:
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "Traceback" not in text, text
        return text

    return read
