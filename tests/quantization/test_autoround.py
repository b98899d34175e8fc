"""Rounding with the package auto-round, in a process of its own: importing it changes Transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("auto_round") is None, reason="no auto-round")

ROOT = Path(__file__).parents[2]

# A block of two linear layers that is called in an unusual way, on samples of different lengths.
SCRIPT = """
import json, sys
import torch
from torch import nn
from transformers import LlamaConfig
from fastgen.quantization.autoround import Call, tune
from fastgen.quantization.quantized_tensor import check, dequantized
from fastgen.quantization.rtn import Kind, make_grid, round_to_nearest

bits, symmetric, dtype = int(sys.argv[1]), sys.argv[2] == "True", getattr(torch, sys.argv[3])
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.small = nn.Linear(64, 24, bias=False)  # not a size that the package takes

    def forward(self, added, *, x, mask=None):
        return self.down(torch.relu(self.up(x + added))) + self.small(x).sum(-1, keepdim=True), mask

block = Block().to(dtype).requires_grad_(False)
inputs = [torch.randn(1, length, 64, dtype=dtype) * torch.logspace(0, 1, 64).to(dtype) for length in (5, 9, 16, 7, 11)]
calls = []
for x in inputs:
    args, kwargs = (torch.ones(64, dtype=dtype),), {"x": x, "mask": torch.ones(1, x.shape[1], dtype=torch.bool)}
    calls.append(Call(args, kwargs, block(*args, **kwargs)))
before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
kinds = {name: Kind(bits, 32, symmetric, dtype) for name in ("up", "down", "small")}

def error(weights):
    saved = {name: block.get_submodule(name).weight.clone() for name in weights}
    for name, weight in weights.items():
        block.get_submodule(name).weight.copy_(weight)
    lost = sum(float((block(*args, **kwargs)[0] - wanted[0]).float().square().sum()) for args, kwargs, wanted in calls)
    for name, weight in saved.items():
        block.get_submodule(name).weight.copy_(weight)
    return lost

found = [tune(block, kinds, calls, LlamaConfig(), 60) for _ in range(2)]
for weight in found[0].values():
    check(weight)
weights = {name: block.get_submodule(name).weight for name in found[0]}
nearest = {
    name: dequantized(round_to_nearest(weight, make_grid(weight, kinds[name])), dtype)
    for name, weight in weights.items()
}
print(json.dumps({
    "names": sorted(found[0]),
    "unchanged": all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items()),
    "again": all(torch.equal(found[0][name].qweight, found[1][name].qweight) for name in found[0]),
    "qweight": {name: [int(w.qweight.min()), int(w.qweight.max())] for name, w in found[0].items()},
    "zeros": {name: w.zeros is not None for name, w in found[0].items()},
    "scales": {name: str(w.scales.dtype) for name, w in found[0].items()},
    "tuned": error({name: dequantized(weight, dtype) for name, weight in found[0].items()}),
    "nearest": error(nearest),
}))
"""


@pytest.mark.parametrize(
    ("bits", "symmetric", "dtype"),
    [(4, True, "float32"), (4, False, "float32"), (8, True, "float32"), (4, True, "bfloat16")],
)
def test_a_block_is_nearer_to_what_it_was_than_rounded_to_nearest(bits: int, symmetric: bool, dtype: str) -> None:
    words = [sys.executable, "-c", SCRIPT, str(bits), str(symmetric), dtype]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["names"] == ["down", "up"]
    assert found["unchanged"] and found["again"]
    assert set(found["zeros"].values()) == {not symmetric} and set(found["scales"].values()) == {f"torch.{dtype}"}
    assert all(least < most < 2**bits for least, most in found["qweight"].values())
    assert 0 < found["tuned"] < (0.8 if bits == 4 else 1.0) * found["nearest"]
