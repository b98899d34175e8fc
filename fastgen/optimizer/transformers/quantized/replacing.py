"""Layers of a model that are replaced by layers on weights of few bits, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastgen.quantization.checkpoint import Format
from fastgen.quantization.layers import QuantizedEmbedding, QuantizedLinear, QuantizedWeight, is_plain_embedding


def sizes(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a layer that can be replaced; None for any other module."""
    if type(module) is nn.Linear:
        return module.out_features, module.in_features
    if type(module) is Conv1D:
        return module.nf, module.nx
    if is_plain_embedding(module):
        return module.num_embeddings, module.embedding_dim
    return None


def replacement(module: nn.Module, form: Format, stored: Mapping[str, Tensor]) -> QuantizedWeight:
    """A layer for the tensors `stored`, on the device "meta", in place of one that `sizes` knows."""
    shape = sizes(module)
    assert shape is not None
    dtype = module.get_parameter("weight").dtype
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(*shape, form, stored, dtype, module.padding_idx)
    layer = QuantizedLinear(*shape, form, stored, dtype, module._parameters["bias"])
    return layer if isinstance(module, nn.Linear) else _mark(layer)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The model's layers on weights of few bits, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def tied_to(model: Any, layer: str) -> list[str]:
    """The other layers that have the weight of this one."""
    weight, tied = f"{layer}.weight", model.all_tied_weights_keys
    source = tied.get(weight, weight)
    group = {source, *(target for target, of in tied.items() if of == source)}
    return sorted(name.removesuffix(".weight") for name in group - {weight}) if len(group) > 1 else []


class Replaced:
    """Layers of a model on weights in few bits from its files; what is tied to one of them has its weight.

    Attributes:
        shared: those that have the weight of another one, by their names, with the name of that one.
    """

    def __init__(self, model: Any, stored: Mapping[str, tuple[Format, Mapping[str, Tensor]]]) -> None:
        """Puts them in the place of the model's own: for each that the files have, its format and tensors on "meta"."""
        # In the files as well, and of its own: not tied.
        self.shared = {other: name for name in stored for other in tied_to(model, name) if other not in stored}
        for name, (form, tensors) in stored.items():
            model.set_submodule(name, replacement(model.get_submodule(name), form, tensors))
        for name, source in self.shared.items():
            model.set_submodule(name, replacement(model.get_submodule(name), stored[source][0], {}))
        handled = {f"{name}.weight" for name in (*self.shared, *stored)}
        tied = model.all_tied_weights_keys
        handled_ties = {target: source for target, source in tied.items() if {target, source} & handled}
        # As the library had them, for a model that is unpacked again. Those of two weights in the files were none.
        shared = {f"{name}.weight" for name in self.shared}
        self._ties = {target: source for target, source in handled_ties.items() if {target, source} & shared}
        for target in handled_ties:
            del tied[target]

    def pack(self, model: nn.Module) -> None:
        """Packs what has been loaded. Raises ValueError, with the layer's name, where a tensor does not fit."""
        layers = quantized_layers(model)
        for name, layer in layers.items():
            if name in self.shared:
                continue
            try:
                layer.pack()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for name, source in self.shared.items():
            layers[name].share(layers[source])

    def dequantize(self, model: Any, dtype: torch.dtype | str) -> None:
        """Puts plain layers with the same weights, in this dtype, in their place, tied as they were."""
        _dequantize(model, dtype)
        self.shared = {}
        if self._ties:
            model.all_tied_weights_keys |= self._ties
            model.tie_weights(recompute_mapping=False)


def _mark(layer: QuantizedLinear) -> QuantizedLinear:
    """Notes that this layer stands for a Conv1D, whose weight is [inputs, outputs]."""
    vars(layer)["stands_for"] = Conv1D
    return layer


def _dequantize(model: Any, dtype: torch.dtype | str) -> None:
    if isinstance(dtype, str):  # as the library notes it in a configuration
        dtype = getattr(torch, dtype)
    for name, layer in quantized_layers(model).items():
        assert isinstance(layer, (QuantizedLinear, QuantizedEmbedding))
        plain: nn.Module = layer.to(dtype).dequantize()
        if "stands_for" in vars(layer):
            plain = _as_conv1d(plain)
        model.set_submodule(name, plain)


def _as_conv1d(plain: Any) -> nn.Module:
    with torch.device("meta"):
        layer = Conv1D(plain.out_features, plain.in_features)
    layer.weight = nn.Parameter(plain.weight.detach().t().contiguous(), requires_grad=False)
    layer.bias = plain.bias
    return layer.train(plain.training)
