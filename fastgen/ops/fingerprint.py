"""A fingerprint of a tensor: whether its contents are still those that something was made of, on the CPU.

Torch's count of versions does not see writes through `parameter.data`. Contents tell for certain, at the price of
reading them once. There are kernels alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library


def fingerprint(x: Tensor) -> int:
    """64 bits that change with every element of a contiguous tensor, of any type.

    Two contents that differ have the same one by accident only, about once in 2**64 times. Read at memory speed.

    Raises:
        RuntimeError: the tensor is not contiguous.
    """
    return torch.ops.fastgen.fingerprint.default(x)


is_available, backend = _library.asking("fastgen::fingerprint")
_library.define("fingerprint(Tensor x) -> int")
