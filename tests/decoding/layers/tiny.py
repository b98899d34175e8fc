"""Layers as small as they come, and whether one has a faster form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastgen.decoding.layer_forms import FloatLinear, QuantizedLinear


class Transposed(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


KINDS = {nn.Linear: False, Transposed: True}

# Every way in which a weight or bias may change.
each_change = pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
        lambda layer: setattr(layer.weight, "data", layer.weight * 2),
        lambda layer: layer.bias.add_(1),
        lambda layer: setattr(layer, "bias", None),
    ],
    ids=["in place", "replaced", "its data replaced", "bias in place", "bias removed"],
)


def model_of_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), Transposed(30, 50), nn.Linear(50, 7, bias=False))


def is_replaced(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), FloatLinear | QuantizedLinear)
