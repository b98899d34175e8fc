"""Forward passes of one call keep the memory that they free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastgen.decoding import host_memory
from fastgen.optimizer.transformers.encoders import call


@pytest.mark.skipif(host_memory.unavailable() is not None, reason="memory is not kept here")
def test_passes_of_one_call_share_memory() -> None:
    with call.layers_of_passes(SimpleNamespace(device=torch.device("cpu"))):
        assert host_memory._inside
    assert not host_memory._inside
