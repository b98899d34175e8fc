"""What captured processors have of a call, or of each input: in tensors that stay where a recording found them."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor


class Bucket(NamedTuple):
    """What constants and buffers are made for."""

    device: torch.device  # of the scores
    inputs: int  # those of the call come first
    per_input: int  # rows of each
    vocabulary: int  # of the scores
    slots: bool = False  # inputs come and go: each has numbers of its own
    is_float32: bool = True  # the model computes in it: of scores, few are equal


class Number:
    """A number that a call gives, or each input of a step with slots.

    Tensors compute with it as with one of Python's, from the operators that the library's processors use: numbers alone
    in double precision, and with a tensor in the type of that.

    Attributes:
        values: of no dimension, or [rows, 1] with slots.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype = torch.float64) -> None:
        self._per_input, size = bucket.per_input, list[int]()
        if bucket.slots:
            assert bucket.device.type == "cpu", "slots are on the CPU"
            size = [bucket.inputs * bucket.per_input, 1]
        self.values = torch.zeros(size, dtype=dtype, device=bucket.device)
        # A GPU divides by a number from the host by multiplying with its inverse.
        self._inverse = torch.zeros((), device=bucket.device) if self.values.is_cuda else None

    def put(self, value: float, target: int | None) -> None:
        """For an input, where each has its own, or for all."""
        (self.values if target is None else self._of(target)).fill_(value)
        if self._inverse is not None:
            self._inverse.fill_(value).reciprocal_()

    def insert(self, other: Number, source: int, target: int) -> None:
        """Takes over the number of an input. Where all inputs have the same, there is nothing to do."""
        if self.values.dim():
            self._of(target).copy_(other._of(source))

    def of_batch(self, batch: int) -> Number:
        """One for so many inputs, with the number of the first."""
        other = copy.copy(self)
        if self.values.dim():
            other.values = self.values[:1].repeat(batch * self._per_input, 1)
        return other

    def _of(self, place: int) -> Tensor:
        return self.values[place * self._per_input : (place + 1) * self._per_input]

    def _like(self, x: Tensor) -> Tensor:
        return self.values.to(x.dtype) if self.values.dim() else self.values

    def __mul__(self, x: Tensor) -> Tensor:
        return x * self._like(x)

    __rmul__ = __mul__

    def __rtruediv__(self, x: Tensor) -> Tensor:
        return x / self._like(x) if self._inverse is None else x * self._inverse

    def __gt__(self, x: Tensor) -> Tensor:
        return x < self._like(x)


class Buffer:
    """A tensor that changes from call to call, at an address that does not."""

    def __init__(self, bucket: Bucket, per_input: int, *width: int, fill: int) -> None:
        self._per_input, self._fill, size = per_input, fill, (bucket.inputs * per_input, *width)
        self.tensor = torch.full(size, fill, dtype=torch.int64, device=bucket.device)

    def of_batch(self, batch: int) -> Buffer:
        """One for so many inputs."""
        other = copy.copy(self)
        other.tensor = self.tensor.new_full((batch * self._per_input, *self.tensor.shape[1:]), self._fill)
        return other

    def refill(self, values: Tensor) -> bool:
        """Whether `values` fit, which are then in the buffer, at its beginning."""
        if any(size > capacity for size, capacity in zip(values.shape, self.tensor.shape, strict=True)):
            return False
        self.tensor.fill_(self._fill)
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values)
        return True
