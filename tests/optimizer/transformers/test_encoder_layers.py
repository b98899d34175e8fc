"""When the layers of an encoder have another product, and memory that is freed is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen import settings
from fastgen.decoding import host_memory
from fastgen.ops.linear import choose
from fastgen.optimizer.transformers.encoders import attention, call, programs

MANY = {"input_ids": torch.ones(2, programs.MOST_TOKENS, dtype=torch.long)}
FEW = {"input_ids": torch.ones(1, programs.MOST_TOKENS, dtype=torch.long)}


@pytest.mark.parametrize(
    ("given", "changes", "dtype", "changed"),
    [
        (MANY, {}, torch.float32, True),
        (FEW, {}, torch.float32, False),
        ({}, {}, torch.float32, False),
        (MANY, {"packed_weights": "never"}, torch.float32, False),
        (MANY, {}, torch.bfloat16, False),
    ],
)
def test_layers_in_float32_change_for_many_rows(
    given: dict[str, Any], changes: dict[str, str], dtype: torch.dtype, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def fast_layers(model: Any) -> AbstractContextManager[None]:
        asked.append(model)
        return nullcontext()

    def changes_with(model: Any, has_gradients: bool = False) -> bool:
        asked.clear()
        with torch.set_grad_enabled(has_gradients), settings.changed(**changes), call._many_rows(model, given):
            assert attention._is_overridden.get() is bool(asked)
        assert not attention._is_overridden.get()
        return bool(asked)

    monkeypatch.setattr(call, "fast_layers", fast_layers)
    monkeypatch.setattr(choose, "is_available", lambda: True)
    model = SimpleNamespace(dtype=dtype, _compiled_call_impl=None)
    assert changes_with(model) is changed
    assert not changes_with(SimpleNamespace(dtype=dtype, _compiled_call_impl=model))
    assert not changes_with(model, has_gradients=True)
    monkeypatch.setattr(choose, "is_available", lambda: False)
    assert not changes_with(model)


@pytest.mark.skipif(host_memory.unavailable() is not None, reason="memory is not kept here")
def test_passes_of_one_call_share_memory() -> None:
    with call.layers_of_passes(SimpleNamespace(device=torch.device("cpu"))):
        assert host_memory._inside
    assert not host_memory._inside
