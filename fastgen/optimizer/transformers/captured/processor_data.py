"""Data of captured processors for a call, or for each input, in tensors whose addresses a recording keeps."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor


class Bucket(NamedTuple):
    """What constants and buffers of processors are made for."""

    device: torch.device  # of the scores
    inputs: int  # number of inputs of the step; those of the call come first
    per_input: int  # rows of each input
    vocabulary: int  # number of scores of a row
    slots: bool = False  # inputs come and go: each has its own numbers
    is_float32: bool = True  # the model computes in float32, so that few scores are equal


class Number:
    """A number that each call sets, or each input of a step with slots.

    The operators that the library's processors use compute with it as with a Python number: in double precision with
    other numbers, and in a tensor's dtype with a tensor.

    Attributes:
        values: 0-dim, or [rows, 1] with slots.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype = torch.float64) -> None:
        self._per_input, size = bucket.per_input, list[int]()
        if bucket.slots:
            assert bucket.device.type == "cpu", "slots are on the CPU"
            size = [bucket.inputs * bucket.per_input, 1]
        self.values = torch.zeros(size, dtype=dtype, device=bucket.device)
        # A GPU divides by a host number by multiplying with its inverse.
        self._inverse = torch.zeros((), dtype=torch.float32, device=bucket.device) if self.values.is_cuda else None

    def put(self, value: float, target: int | None) -> None:
        """Sets the number of an input, if each has its own, or of all inputs."""
        (self.values if target is None else self._of(target)).fill_(value)
        if self._inverse is not None:
            self._inverse.fill_(value).reciprocal_()

    def insert(self, other: Number, source: int, target: int) -> None:
        """Takes over the number of an input. Does nothing if all inputs share one number."""
        if self.values.dim():
            self._of(target).copy_(other._of(source))

    def of_batch(self, batch: int) -> Number:
        """Returns a number for `batch` inputs, with the value of the first input."""
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
    """A tensor whose contents change from call to call, and whose address does not."""

    def __init__(self, bucket: Bucket, per_input: int, *width: int, fill: int) -> None:
        self._per_input, self._fill, size = per_input, fill, (bucket.inputs * per_input, *width)
        self.tensor = torch.full(size, fill, dtype=torch.int64, device=bucket.device)

    def of_batch(self, batch: int) -> Buffer:
        """Returns a buffer for `batch` inputs."""
        other = copy.copy(self)
        other.tensor = self.tensor.new_full((batch * self._per_input, *self.tensor.shape[1:]), self._fill)
        return other

    def refill(self, values: Tensor) -> bool:
        """Writes `values` to the beginning of the buffer, and fills the rest. Returns False if they do not fit."""
        if any(size > capacity for size, capacity in zip(values.shape, self.tensor.shape, strict=True)):
            return False
        self.tensor.fill_(self._fill)
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values)
        return True
