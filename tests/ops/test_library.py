"""What is said where the compiled operators are missing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fastgen import report
from fastgen.ops import _library


def test_a_checkout_says_where_it_was_imported_from(tmp_path: Path) -> None:
    """Its folder hides the installed package from Python that runs in it."""
    assert _library._not_built(tmp_path).startswith("the extension was not built: install FastGen again")
    (tmp_path / "setup.py").touch()
    said = _library._not_built(tmp_path)
    assert f"in {tmp_path}, from where fastgen is imported: run Python in another folder" in said


@pytest.mark.parametrize(("asked", "gpu", "accelerates"), [("0", False, False), ("1", False, True), ("0", True, True)])
def test_the_status_without_operators(
    asked: str, gpu: bool, accelerates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU alone, what is built for the CPU is not missed; and it may be left out on purpose."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("FASTGEN_NO_EXT", asked)
    monkeypatch.setattr(_library, "load", lambda device: "the extension was not built")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(report, "check", lambda: report.Finding(True, "a model both ways"))
    line, found = report.line()
    assert found is accelerates and "the extension was not built" in line and "Transformers" in line
    assert ("WITHOUT" in line) is not accelerates


def test_operators_that_are_missing_are_missed_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "load", lambda device: "the extension was not built")
    monkeypatch.setattr(_library, "_has_warned", False)
    monkeypatch.delenv("FASTGEN_NO_EXT", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _library.warn_if_missing(torch.device("cuda"))
    with pytest.warns(RuntimeWarning, match="the extension was not built"):
        _library.warn_if_missing(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _library.warn_if_missing(torch.device("cpu"))
