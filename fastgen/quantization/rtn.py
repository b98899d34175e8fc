"""Rounding to nearest: makes the grid of a weight, and rounds each weight to its nearest point."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization.quantized_tensor import QuantizedTensor

# Parts of the range that a grid may cover, tried to find one that fits better than the grid of all weights.
_SHRINKS = tuple(1 - step / 40 for step in range(17))


class Grid(NamedTuple):
    """The points that the weights of a layer may take: scale * (q - zero) for q from 0 to 2**bits - 1."""

    scales: Tensor  # [N, groups], in the dtype that they are stored in
    zeros: Tensor | None  # uint8 [N, groups]; None if all are 2**(bits - 1)
    bits: int
    group_size: int

    def of_group(self, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
        """Returns scales and zeros of a group, [N] each."""
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[:, group].to(dtype)
        return self.scales[:, group].to(dtype), zeros


class Kind(NamedTuple):
    """The properties of a layer's grids."""

    bits: int = 4  # 4 or 8
    group_size: int = 64  # divides the layer's K
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16


def make_grid(weight: Tensor, kind: Kind, shrink: float = 1.0) -> Grid:
    """Makes a grid for each n and group that covers all of the group's weights.

    Symmetric: the largest absolute value gets the largest q, and the zero point is 2**(bits - 1). Asymmetric: from the
    least weight to the largest, including 0, so that 0 stays 0. Scales are rounded to the dtype that they are stored in
    before anything is rounded to the grid.

    Args:
        weight: [N, K].
        shrink: the part of that range that the grid covers instead.

    Raises:
        ValueError: K is not in whole groups, or a weight is NaN or infinite.
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
    """Returns, of grids with shrinking ranges, the one whose nearest points have the least sum of importance *
    error**2.

    Chosen separately for each n and group of the weight, [N, K]. `importance`, [K], is not negative.
    """
    groups, weights = _groups(weight, kind.group_size), importance.float().view(-1, kind.group_size)
    best, least = make_grid(weight, kind), torch.full(groups.shape[:2], torch.inf, device=weight.device)
    for shrink in _SHRINKS:
        grid = make_grid(weight, kind, shrink)
        points = (_nearest(groups, grid) - _zeros(grid)) * grid.scales.float().unsqueeze(2)
        errors = ((points - groups).square() * weights).sum(2)
        better = errors < least
        zeros = None if best.zeros is None or grid.zeros is None else torch.where(better, grid.zeros, best.zeros)
        best = best._replace(scales=torch.where(better, grid.scales, best.scales), zeros=zeros)
        least = torch.minimum(errors, least)
    return best


def nearest(values: Tensor, scales: Tensor, zeros: Tensor | int, bits: int) -> Tensor:
    """Returns the quantised values of the nearest points, in the dtype of `values`; scales and zeros are broadcast."""
    return (values / scales + zeros).round().clamp(0, 2**bits - 1)


def round_to_nearest(weight: Tensor, grid: Grid) -> QuantizedTensor:
    """Rounds each weight, [N, K], to its nearest point."""
    return on_grid(_nearest(_groups(weight, grid.group_size), grid).view_as(weight), grid)


def on_grid(qweight: Tensor, grid: Grid) -> QuantizedTensor:
    """Returns quantised values of a grid, [N, K], as a weight."""
    return QuantizedTensor(qweight.to(torch.uint8), grid.scales, grid.zeros, None, grid.bits, grid.group_size, None)


def _groups(weight: Tensor, group_size: int) -> Tensor:
    n, k = weight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(f"{k} in_features are not whole groups of {group_size}")
    return weight.float().reshape(n, -1, group_size)


def _nearest(groups: Tensor, grid: Grid) -> Tensor:
    return nearest(groups, grid.scales.float().unsqueeze(2), _zeros(grid), grid.bits)


def _zeros(grid: Grid) -> Tensor | int:
    return 2 ** (grid.bits - 1) if grid.zeros is None else grid.zeros.float().unsqueeze(2)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds scales as they are stored: never 0, because they are divisors. A group of zeros may have any scale."""
    limits = torch.finfo(dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return scales.clamp(limits.tiny * limits.eps, limits.max).to(dtype)
