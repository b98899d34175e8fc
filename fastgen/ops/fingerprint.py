"""A fingerprint of a tensor on the CPU: tells whether its contents have changed since something was derived from them.

Torch's version counter does not see writes through `parameter.data`. Contents are reliable, at the price of reading
them once. This operator has kernels only, and no reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library


def fingerprint(x: Tensor) -> int:
    """Returns 64 bits that change with every element of a contiguous tensor of any type.

    Two different contents have the same fingerprint only by accident, about once in 2**64 times. Reads at memory speed.

    Raises:
        RuntimeError: the tensor is not contiguous.
    """
    return torch.ops.fastgen.fingerprint.default(x)


is_available = _library.availability("fastgen::fingerprint")
_library.define("fingerprint(Tensor x) -> int")
