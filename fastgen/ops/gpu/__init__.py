"""Triton kernels of the operators in `fastgen.ops`, and their launch.

    launches                        those of attention, the best candidates, KV writes and RMS norm
    _kernels, _grouped_kernels      the kernels; only their import needs Triton

`fastgen.ops.linear.on_gpu` launches `_grouped_kernels`. An operator asks whether there is a kernel for its tensors
(`available`), and only then imports the launch. Nothing here synchronizes, and no grid depends on the contents of
device memory: every call can be captured in a CUDA graph, and its replays read the lengths, positions and tables of
that time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The first architecture that Triton supports.
_LEAST_CAPABILITY = (8, 0)

KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types that the kernels compute with. Sums are float32 for all of them."""


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, statement by statement: a way to test them without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def available(*tensors: Tensor | None) -> bool:
    """Whether kernels can run on these tensors: Triton is installed, and they are on an NVIDIA GPU or interpreted."""
    if not is_installed():
        return False
    devices = {tensor.device.type for tensor in tensors if tensor is not None}
    if devices == {"cpu"}:
        return is_interpreted()
    return devices == {"cuda"} and torch.version.hip is None


def unavailable(device: torch.device) -> str | None:
    """Returns why kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.version.hip is not None:
        return "the GPU is not NVIDIA's"
    if not is_installed():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "the GPU is older than those that Triton compiles for"
    return None


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **options: Any) -> None:
    """Launches a kernel on the device of its tensors; does nothing for an empty grid."""
    if not all(grid):
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **options)


@functools.cache
def limits(device: torch.device) -> tuple[int, int]:
    """Returns the multiprocessors, and bytes of shared memory per program. Without a GPU, those of an H200."""
    if device.type != "cuda":
        return 132, 227 * 1024
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
