"""Rounding to nearest: the grid of a weight, and each weight on its nearest point."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization.grouped import GroupedWeight

# Parts of the range that a grid may cover, when one is looked for that fits better than that of all weights.
_SHRINKS = tuple(1 - step / 40 for step in range(17))


class Grid(NamedTuple):
    """The points that the weights of a layer may take: scale * (number - zero) for numbers from 0 to 2**bits - 1."""

    scales: Tensor  # [outputs, groups], of the dtype that they are stored in
    zeros: Tensor | None  # uint8 [outputs, groups]; None where all are 2**(bits - 1)
    bits: int
    group_size: int

    def of_group(self, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
        """Scales and zeros of a group of inputs, [outputs] each."""
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[:, group].to(dtype)
        return self.scales[:, group].to(dtype), zeros


class Kind(NamedTuple):
    """What grids of a layer are like."""

    bits: int = 4  # 4 or 8
    group_size: int = 64  # inputs that share a scale; divides the layer's inputs
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16


def make_grid(weight: Tensor, kind: Kind, shrink: float = 1.0) -> Grid:
    """A grid for each output and group of inputs that covers all of the group's weights.

    Symmetric: the largest absolute value is the largest number, and 0 is 2**(bits - 1). Asymmetric: from the least
    weight to the largest, 0 included, so that 0 stays 0. Scales are rounded to the dtype that they are stored in
    before anything is rounded to the grid.

    Args:
        weight: [outputs, inputs].
        shrink: the part of that range that the grid covers instead.

    Raises:
        ValueError: the inputs are not whole groups, or a weight is NaN or infinite.
    """
    groups = _groups(weight, kind.group_size)
    if not bool(groups.isfinite().all()):
        raise ValueError("some of the weights are NaN or infinite")
    if kind.symmetric:
        scales = _stored(groups.abs().amax(2) * (shrink / (2 ** (kind.bits - 1) - 1)), kind.scale_dtype)
        return Grid(scales, None, kind.bits, kind.group_size)
    largest = 2**kind.bits - 1
    least, most = groups.amin(2).clamp(max=0) * shrink, groups.amax(2).clamp(min=0) * shrink
    scales = _stored((most - least) / largest, kind.scale_dtype)
    zeros = (-least / scales.float()).round().clamp(0, largest).to(torch.uint8)
    return Grid(scales, zeros, kind.bits, kind.group_size)


def best_grid(weight: Tensor, kind: Kind, importance: Tensor) -> Grid:
    """The grid whose nearest points have the least sum of importance * error**2, of grids that cover less and less.

    Each output and group of inputs has its own.

    Args:
        weight: [outputs, inputs].
        importance: [inputs], not negative.
    """
    groups, weights = _groups(weight, kind.group_size), importance.float().view(-1, kind.group_size)
    best, least = make_grid(weight, kind), None
    for shrink in _SHRINKS:
        grid = make_grid(weight, kind, shrink)
        errors = ((_points(groups, grid) - groups).square() * weights).sum(2)
        if least is None:
            least = errors
            continue
        better = errors < least
        zeros = None if best.zeros is None or grid.zeros is None else torch.where(better, grid.zeros, best.zeros)
        best = best._replace(scales=torch.where(better, grid.scales, best.scales), zeros=zeros)
        least = torch.minimum(errors, least)
    return best


def nearest(values: Tensor, scales: Tensor, zeros: Tensor | int, bits: int) -> Tensor:
    """The numbers of the nearest points, in the dtype of `values`; scales and zeros are broadcast."""
    return (values / scales + zeros).round().clamp(0, 2**bits - 1)


def round_to_nearest(weight: Tensor, grid: Grid) -> GroupedWeight:
    """Each weight, [outputs, inputs], on its nearest point."""
    return grouped(_numbers(_groups(weight, grid.group_size), grid).view_as(weight), grid)


def grouped(numbers: Tensor, grid: Grid) -> GroupedWeight:
    """Numbers of a grid, [outputs, inputs], as a weight."""
    return GroupedWeight(numbers.to(torch.uint8), grid.scales, grid.zeros, None, grid.bits, grid.group_size, None)


def _groups(weight: Tensor, group_size: int) -> Tensor:
    outputs, inputs = weight.shape
    if group_size < 1 or inputs % group_size:
        raise ValueError(f"{inputs} inputs are not whole groups of {group_size}")
    return weight.float().reshape(outputs, -1, group_size)


def _numbers(groups: Tensor, grid: Grid) -> Tensor:
    return nearest(groups, grid.scales.float().unsqueeze(2), _zeros(grid), grid.bits)


def _points(groups: Tensor, grid: Grid) -> Tensor:
    return (_numbers(groups, grid) - _zeros(grid)) * grid.scales.float().unsqueeze(2)


def _zeros(grid: Grid) -> Tensor | int:
    return 2 ** (grid.bits - 1) if grid.zeros is None else grid.zeros.float().unsqueeze(2)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they are stored: never 0, which nothing can be divided by. A group of zeros may have any scale."""
    limits = torch.finfo(dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return scales.clamp(limits.tiny * limits.eps, limits.max).to(dtype)
