"""When the layers of an encoder have another product, and memory that is freed is kept."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen import settings
from fastgen.decoding import host_memory
from fastgen.ops import linear
from fastgen.optimizer.transformers.encoders import call, programs

MANY = {"input_ids": torch.ones(2, programs.MOST_TOKENS, dtype=torch.long)}
FEW = {"input_ids": torch.ones(1, programs.MOST_TOKENS, dtype=torch.long)}


@pytest.mark.parametrize(
    ("given", "changes", "dtype", "changed"),
    [
        (MANY, {}, torch.float32, True),
        (FEW, {}, torch.float32, False),
        ({}, {}, torch.float32, False),
        (MANY, {"linear_products": "fixed"}, torch.float32, False),  # its result must not depend on what is measured
        (MANY, {"packed_weights": "never"}, torch.float32, False),
        (MANY, {}, torch.bfloat16, False),
    ],
)
def test_layers_in_float32_change_for_many_rows(
    given: dict[str, Any], changes: dict[str, str], dtype: torch.dtype, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "fast_layers", lambda model: nullcontext("fast"))
    monkeypatch.setattr(linear, "is_available", lambda: True)
    model = SimpleNamespace(dtype=dtype, _compiled_call_impl=None)
    with torch.no_grad(), settings.changed(**changes), call._many_rows(model, given) as found:
        assert found == ("fast" if changed else None)
    compiled = SimpleNamespace(dtype=dtype, _compiled_call_impl=model)
    with torch.no_grad(), settings.changed(**changes), call._many_rows(compiled, given) as found:
        assert found is None
    with torch.enable_grad(), settings.changed(**changes), call._many_rows(model, given) as found:
        assert found is None
    monkeypatch.setattr(linear, "is_available", lambda: False)
    with torch.no_grad(), settings.changed(**changes), call._many_rows(model, given) as found:
        assert found is None


@pytest.mark.skipif(host_memory.unavailable() is not None, reason="memory is not kept here")
def test_passes_of_one_call_share_memory() -> None:
    with call.layers_of_passes(SimpleNamespace(device=torch.device("cpu"))):
        assert host_memory._inside
    assert not host_memory._inside
