"""The package needs no Triton: it is imported by the first kernel that runs, and the references serve without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgen.ops import gpu as package

ROOT = Path(__file__).parents[3]
USE_ALL = """
import os, sys
blocked = "FASTGEN_NO_EXT" in os.environ
if blocked:
    sys.modules["triton"] = None
import torch
from fastgen.ops import _library, attention, kv_write, rms_norm, search_step
assert blocked or "triton" not in sys.modules
x, cache = torch.ones(2, 1, 8), torch.zeros(2, 1, 3, 8)
kv_write.kv_write(x, x, cache, cache.clone(), torch.tensor(1))
assert cache[:, :, 1].eq(1).all()
assert attention.decode_attention(*[x.unsqueeze(2)] * 3).eq(1).all()
assert rms_norm.rms_norm(x, torch.ones(8)).sub(1).abs().max() < 1e-5
assert search_step.best_continuations(x[:, 0], torch.zeros(1, 2), 4).scores.shape == (1, 4)
assert blocked or "triton" not in sys.modules
if blocked:
    args = torch.randn(4, 2, 1, 8), *torch.randn(2, 2, 2, 5, 8), *torch.randn(2, 4, 2, 3, 8)
    assert torch.equal(attention.decode_attention(*args), attention.reference(*args))
    assert torch.equal(attention.shared_prefix_attention(*args), attention.composed(*args))
    assert _library.backend("fastgen::decode_attention_out").startswith("torch reference: FASTGEN_NO_EXT is set")
"""


@pytest.mark.parametrize("own", [{}, {"FASTGEN_NO_EXT": "1"}], ids=["not interpreted", "no kernels at all"])
def test_references_serve(own):
    """Without Triton and the extension, too."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)} | own
    done = subprocess.run([sys.executable, "-c", USE_ALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_available():
    on_cpu, nowhere = torch.empty(1), torch.empty(1, device="meta")
    assert package.available(on_cpu, None) == (package.is_installed() and package.is_interpreted())
    assert not package.available(on_cpu, nowhere)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_power_of_two(n, power):
    assert package.power_of_two(n) == power
