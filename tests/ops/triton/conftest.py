"""The Triton kernels run on the GPU with `--device cuda`, and in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import triton as package


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> None:
    """Skips where the kernels cannot run: comparing the reference with itself would show nothing."""
    if not package.available(torch.empty(0, device=device)):
        pytest.skip(f"the Triton kernels cannot run on {device}: {package.backend()}")
