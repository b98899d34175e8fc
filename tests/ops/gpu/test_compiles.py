"""The kernels compile for an H200, and some for an A100 and for small GPUs, within the limits of each, at the sizes of
real models. No GPU is needed for this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgen.ops import gpu as package
from fastgen.ops.attention import decode_attention
from fastgen.ops.gpu.launches import launch_rms_norm
from fastgen.ops.kv_write import kv_write
from fastgen.ops.linear.on_gpu import multiply, rows
from fastgen.ops.linear.weights import Layout, pack
from fastgen.ops.search_step import best_continuations

ROOT = Path(__file__).parents[3]
# What a case is compiled for, by how its name begins: compute capability, and bytes of shared memory for a program.
# GPUs for workstations (of compute capability 8.6 and 8.9, say) have less.
SMALL, A100 = "on a small GPU: ", "on an A100: "
GPUS = {SMALL: (86, 99 * 1024), A100: (80, 163 * 1024), "": (90, 227 * 1024)}


def gpu_of(name):
    return next(gpu for prefix, gpu in GPUS.items() if name.startswith(prefix))


def attention(dtype, per_input, kv_heads, group, dim, prefix=1024, suffix=144, batch=2, splits=1, **more):
    def run():
        rows, heads = batch * per_input, kv_heads * group
        parts = {}
        if suffix:
            parts = {
                "suffix_keys": torch.empty(rows, kv_heads, suffix, dim, dtype=dtype),
                "suffix_values": torch.empty(rows, kv_heads, suffix, dim, dtype=dtype),
                "suffix_lengths": torch.zeros(rows, dtype=torch.int64),
                "ancestry": torch.zeros(rows, suffix, dtype=torch.int32),
            }
        options = dict(more)
        if options.pop("bias", False):
            options["mask"] = torch.empty(1, heads, 1, prefix + suffix, dtype=dtype)
        prefix_part = torch.empty(batch, kv_heads, prefix, dim, dtype=dtype)
        ends = torch.zeros(batch, dtype=torch.int32)
        query = torch.empty(rows, heads, 1, dim, dtype=dtype)
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
        launch_rms_norm(torch.empty(128, width, dtype=dtype), torch.empty(width, dtype=dtype), **options)

    return run


def candidates(dtype, beams, vocabulary, count, normalise=True):
    def run():
        best_continuations(
            torch.empty(2 * beams, vocabulary, dtype=dtype), torch.empty(2, beams), count, normalise=normalise
        )

    return run


def product(dtype, rows, outputs, inputs, bits=4, group_size=64, form="middle", scales=torch.float16):
    def run():
        weight = grouped(outputs, inputs, bits, group_size, form, scales)
        multiply(torch.empty(rows, inputs, dtype=dtype), weight, torch.empty(outputs, dtype=dtype))

    return run


def grouped(outputs, inputs, bits, group_size, form, scales=torch.float16):
    shape = outputs, -(-inputs // group_size)
    numbers, scales = torch.zeros(outputs, inputs, dtype=torch.uint8), torch.zeros(shape, dtype=scales)
    zeros = torch.zeros(shape, dtype=torch.uint8) if form == "zeros" else None
    mins = scales if form == "mins" else None
    return pack(numbers, scales, zeros, mins, bits=bits, group_size=group_size, layout=Layout.ROWS)


def lines(dtype, inputs, bits=4, group_size=64, form="middle", which=True):
    def run():
        weight = grouped(64, inputs, bits, group_size, form)
        if which:
            rows(weight, torch.zeros(16, dtype=torch.int64), dtype)
        else:
            multiply(torch.zeros(65, inputs, dtype=dtype), weight)

    return run


# By name: arguments of `product` for weights of a Llama of 8B parameters, and at the ends of what there is.
PRODUCTS = {
    "int4, 1 row": (torch.bfloat16, 1, 4096, 4096),
    "int4, 16 rows": (torch.float16, 16, 14336, 4096),
    "int4, 64 rows": (torch.bfloat16, 64, 4096, 14336),
    "int4, groups of 32": (torch.float16, 4, 4096, 4096, 4, 32),
    "int4, groups of 128, zeros": (torch.bfloat16, 16, 4096, 4096, 4, 128, "zeros"),
    "int4, groups of 32, mins": (torch.float16, 16, 4096, 4096, 4, 32, "mins", torch.float32),
    "int4, groups of 256, mins, 64 rows": (torch.bfloat16, 64, 4096, 4096, 4, 256, "mins"),
    "int4, groups of 16": (torch.bfloat16, 16, 4096, 4096, 4, 16, "zeros"),
    "int4, groups of 16, 64 rows": (torch.bfloat16, 64, 4096, 4096, 4, 16, "mins"),
    "int8, 1 row": (torch.bfloat16, 1, 4096, 4096, 8),
    "int8, 64 rows": (torch.float16, 64, 4096, 4096, 8, 128),
    "int8, 16 rows, channels": (torch.bfloat16, 16, 4096, 4096, 8, 4096, "zeros", torch.bfloat16),
    "int8, the output layer": (torch.bfloat16, 4, 32064, 4096, 8, 32),
    "int4, 1 row, float32": (torch.float32, 1, 4096, 4096),
    "int4, 16 rows, float32": (torch.float32, 16, 4096, 4096, 4, 128, "zeros"),
    "int4, 64 rows, float32": (torch.float32, 64, 4096, 4096, 4, 32, "mins"),
    "int8, 64 rows, float32": (torch.float32, 64, 4096, 4096, 8),
}
LINES = {
    "int4": (torch.bfloat16, 4096),
    "int4, mins": (torch.float16, 4096, 4, 32, "mins"),
    "int8, zeros, all": (torch.float32, 4096, 8, 128, "zeros", False),
}
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
    **{f"{gpu}grouped product, {name}": product(*sizes) for gpu in ("", A100) for name, sizes in PRODUCTS.items()},
    **{f"{SMALL}grouped product, {name}": product(*PRODUCTS[name]) for name in PRODUCTS if "64 rows" in name},
    **{f"{gpu}grouped lines, {name}": lines(*sizes) for gpu in ("", A100) for name, sizes in LINES.items()},
}


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """What became of each kernel of the cases that run; compiled in one process, in which nothing is interpreted."""
    if not package.is_installed():
        pytest.skip("triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cases = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.gpu.compiles", *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = {}
    for line in done.stdout.splitlines():
        kernel = json.loads(line)
        found.setdefault(kernel["case"], []).append(kernel)
    return found


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_compiles(name, compiled):
    assert compiled.get(name), "it did not compile"
    for kernel in compiled[name]:
        assert "error" not in kernel, kernel["error"]
        assert kernel["shared"] <= gpu_of(name)[1]
        # Registers that do not fit are spilled to memory, which would cost more than they are worth.
        assert kernel.get("local", 0) == 0 and kernel.get("stack", 0) <= 16, kernel
        if kernel["kernel"] == "attend":
            assert kernel.get("async_copies", True)
            assert "tensor_cores" not in kernel or kernel["tensor_cores"] == ("float32" not in name)
