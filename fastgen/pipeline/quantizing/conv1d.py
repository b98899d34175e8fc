"""Layers of the class Conv1D of Transformers, whose weight is [inputs, outputs], as linear layers, and back."""

from __future__ import annotations

from typing import Any

_MARK = "stands_for_conv1d"


def conv1d_as_linear(model: Any) -> None:
    """Puts a linear layer with the same weight in place of each Conv1D."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if type(module) is Conv1D:
            layer = nn.Linear(module.nx, module.nf, device="meta")
            layer.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
            layer.bias = module.bias
            vars(layer)[_MARK] = True
            model.set_submodule(name, layer.train(module.training))


def linear_as_conv1d(model: Any) -> None:
    """The inverse, for the layers that are still there."""
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if stands_for_conv1d(module):
            with torch.device("meta"):
                layer = Conv1D(module.out_features, module.in_features)
            layer.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
            layer.bias = module.bias
            model.set_submodule(name, layer.train(module.training))


def stands_for_conv1d(layer: Any) -> bool:
    """Whether this layer is in the place of a Conv1D."""
    return _MARK in vars(layer)
