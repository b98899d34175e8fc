"""The KV cache: K and V of every layer during one call of `generate`, and what the model's attention sees of them.

A prefix is stored once per input, and a suffix per row in preallocated memory.
"""

from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""K and V."""
