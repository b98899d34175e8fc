"""The formats of weight copies: how each is made, and which operator multiplies with it.

Only this package makes copies of weights. `cache` decides when, and for how long.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.decoding.weights.cache import STEPS_OF_COPY, Format
from fastgen.ops import approximate_logits, fingerprint, quantized_linear
from fastgen.ops.linear import choose, panels

# Smaller weights stay in the processor's caches.
MIN_PANELS = 2**16


def _panels(weight: Tensor) -> Tensor | None:
    exact = panels.exact_cast(weight)
    return None if exact is None else panels.pack(exact)


# 16-bit panels of a float32 weight that 16 bits represent exactly. Validating the copy costs more than a call of one
# step would gain.
PANELS = Format("panels", _panels, 2.0, is_compared=True, validate_at=2, counted_as="weights read in 16 bits")
# (results, x, copies, biases): several products of one x, [M, K].
multiply_panels = torch.ops.fastgen.panels_gemm_batch_out.default
# For approximate logits: with a guaranteed error bound, and with a likely one for drafts.
LM_HEAD = Format("LM head in 8 bits", approximate_logits.bounded_copy, 1.1, is_compared=True, waits=STEPS_OF_COPY)
DRAFT_HEAD = Format("LM head in 4 bits", approximate_logits.likely_copy, 0.6)


@functools.cache
def low_bit(precision: str, group_size: int) -> Format:
    """Returns the format of `weight_dtype` and of drafts: "int8" or "int4" in groups along K, or "bf16"."""
    itemsize = {"bf16": 2.0, "int8": 1.0 + 2 / group_size, "int4": 0.5 + 2 / group_size}[precision]
    return Format(precision, lambda weight: quantized_linear.pack(weight, precision, group_size), itemsize)


LowBitWeight = quantized_linear.PackedWeight | quantized_linear.PackedBF16


def multiply_low_bit(x: Tensor, copy: LowBitWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` with a `low_bit` copy of the weight (`quantized_linear`)."""
    return quantized_linear.quantized_linear(x, copy, bias)


def is_for(device: torch.device) -> bool:
    """Whether weights on this device can have `low_bit` copies, if all requirements are installed."""
    return quantized_linear.is_for(device)


def unavailable(precision: str, device: torch.device | None = None) -> str | None:
    """Returns why this device, by default the CPU, has no products with `low_bit` copies; None if it has."""
    return quantized_linear.unavailable(precision, device)


def has_low_bit(weight: Tensor, precision: str) -> bool:
    """Whether a weight of this dtype, on this device, has a `low_bit` copy."""
    return weight.dtype in quantized_linear.types(precision, weight.device)


def has_panels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether such an op likely reads its weight from `PANELS`, judged by a sample of the weight's elements.

    x is [M, K], the weight [N, K], the bias [N] or None.
    """
    return (
        weight.numel() >= MIN_PANELS
        and panels.serves(x, weight, bias)
        and choose.reads_panels(x.shape[0])
        and fingerprint.is_available()
        and bool(panels.likely_types(weight))
    )
