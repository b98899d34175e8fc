"""The kernels compile for an H200, within its limits, at the sizes of real models. No GPU is needed for this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgen.ops import triton as package
from fastgen.ops.triton.beam_step import best_continuations
from fastgen.ops.triton.decode_attention import decode_attention
from fastgen.ops.triton.kv_write import kv_write
from fastgen.ops.triton.norm import launch

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 * 1024
# GPUs for workstations (of compute capability 8.6 and 8.9, say) have less.
SMALL_SHARED_BYTES = 99 * 1024


def attention(dtype, per_input, kv_heads, group, dim, prefix=1024, suffix=144, batch=2, splits=1, **more):
    def run():
        rows, heads = batch * per_input, kv_heads * group
        parts = {}
        if suffix:
            parts = {
                "suffix_keys": torch.empty(rows, kv_heads, suffix, dim, dtype=dtype),
                "suffix_values": torch.empty(rows, kv_heads, suffix, dim, dtype=dtype),
                "suffix_length": torch.zeros(rows, dtype=torch.int64),
                "ancestry": torch.zeros(rows, suffix, dtype=torch.int32),
            }
        options = dict(more)
        if options.pop("bias", False):
            options["bias"] = torch.empty(1, heads, prefix + suffix, dtype=dtype)
        prefix_part = torch.empty(batch, kv_heads, prefix, dim, dtype=dtype)
        ends = torch.zeros(batch, dtype=torch.int32)
        query = torch.empty(rows, heads, dim, dtype=dtype)
        decode_attention(query, prefix_part, prefix_part, ends=ends, splits=splits, **parts, **options)

    return run


def write(dtype, heads, dim):
    def run():
        new = torch.empty(128, heads, dim, dtype=dtype)
        cache = torch.empty(128, heads, 144, dim, dtype=dtype)
        kv_write(new, new, cache, cache, torch.zeros(128, dtype=torch.int64))

    return run


def normalise(dtype, width, **options):
    def run():
        launch(torch.empty(128, width, dtype=dtype), torch.empty(width, dtype=dtype), **options)

    return run


def candidates(dtype, beams, vocabulary, count, normalise=True):
    def run():
        best_continuations(
            torch.empty(2 * beams, vocabulary, dtype=dtype), torch.empty(2, beams), count, normalise=normalise
        )

    return run


SMALL = "on a small GPU: "
CASES = {
    "attention, bart-large": attention(torch.float16, 4, 16, 1, 64),
    "attention, bart-large, in parts": attention(torch.float16, 4, 16, 1, 64, splits=4),
    "attention, t5": attention(torch.bfloat16, 4, 12, 1, 64, bias=True, scale=1.0),
    "attention, llama": attention(torch.bfloat16, 1, 8, 4, 128, splits=8),
    "attention, gemma 2": attention(torch.bfloat16, 4, 4, 2, 256, window=4096),
    "attention, gpt-oss": attention(torch.bfloat16, 4, 8, 8, 64, window=128),
    "attention, one query of one head, in parts": attention(torch.float16, 1, 1, 1, 64, batch=1, splits=4),
    "attention, 80": attention(torch.float16, 1, 32, 1, 80),
    "attention, many rows": attention(torch.float16, 8, 4, 8, 128),
    "attention, float32": attention(torch.float32, 4, 12, 1, 64),
    "attention, float32, 256": attention(torch.float32, 4, 4, 2, 256),
    "kv write, bart-large": write(torch.float16, 16, 64),
    "rms norm, t5": normalise(torch.float16, 1024, rounds_scaled=True),
    "rms norm, 40,000": normalise(torch.float32, 40000),
    "rms norm, 16384": normalise(torch.bfloat16, 16384),
    "rms norm, llama": normalise(torch.bfloat16, 4096, rounds_scaled=True),
    "beam step, bart-large": candidates(torch.float16, 4, 50265, 8),
    "beam step, 8 beams of 128k": candidates(torch.float32, 8, 128256, 16),
    "on a small GPU: attention, bart-large": attention(torch.float16, 4, 16, 1, 64),
    "on a small GPU: attention, many rows of 256": attention(torch.bfloat16, 8, 4, 8, 256),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What became of each kernel of each case; compiled in one process, in which nothing is interpreted."""
    if not package.is_installed():
        pytest.skip("triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.triton.compiles", *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = {}
    for line in done.stdout.splitlines():
        kernel = json.loads(line)
        found.setdefault(kernel["case"], []).append(kernel)
    return found


@pytest.mark.parametrize("name", CASES)
def test_compiles(name, compiled):
    assert compiled.get(name), "it did not compile"
    for kernel in compiled[name]:
        assert "error" not in kernel, kernel["error"]
        assert kernel["shared"] <= (SMALL_SHARED_BYTES if name.startswith(SMALL) else SHARED_BYTES)
        # Registers that do not fit are spilled to memory, which would cost more than they are worth.
        assert kernel.get("local", 0) == 0 and kernel.get("stack", 0) <= 16, kernel
        if kernel["kernel"] == "attend":
            assert kernel.get("async_copies", True)
            assert "tensor_cores" not in kernel or kernel["tensor_cores"] == ("float32" not in name)
