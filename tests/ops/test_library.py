"""What is said where the compiled operators are missing."""

from __future__ import annotations

import warnings

import pytest
import torch

from fastgen.ops import _library


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
