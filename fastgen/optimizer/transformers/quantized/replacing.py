"""Replaces layers of a model by layers with low-bit weights, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastgen.quantization.checkpoint import Format
from fastgen.quantization.layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedLinearLayer,
    QuantizedWeight,
    is_plain_embedding,
)


class QuantizedConv1D(QuantizedLinearLayer, Conv1D):
    """Replaces the library's Conv1D, whose weight is [K, N]."""

    transposed = True

    def __init__(self, *weight: Any, bias: nn.Parameter | None = None) -> None:
        super().__init__(*weight, bias=bias)
        self.nf, self.nx = self.n, self.k

    def _plain(self, dtype: torch.dtype) -> Conv1D:
        with torch.device("meta"):
            return Conv1D(self.nf, self.nx)


def sizes(module: nn.Module) -> tuple[int, int] | None:
    """Returns N and K of a layer that can be replaced; None for any other module."""
    if type(module) is nn.Linear:
        return module.out_features, module.in_features
    if type(module) is Conv1D:
        return module.nf, module.nx
    if is_plain_embedding(module):
        return module.num_embeddings, module.embedding_dim
    return None


def replacement(module: nn.Module, form: Format, stored: Mapping[str, Tensor]) -> QuantizedWeight:
    """Returns a layer for the tensors `stored`, on the device "meta", that replaces one accepted by `sizes`."""
    shape = sizes(module)
    assert shape is not None
    dtype = module.get_parameter("weight").dtype
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(*shape, form, stored, dtype, padding_idx=module.padding_idx)
    kind = QuantizedConv1D if isinstance(module, Conv1D) else QuantizedLinear
    return kind(*shape, form, stored, dtype, bias=module._parameters["bias"])


def quantized_layers(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Returns the model's layers with low-bit weights, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def tied_to(model: Any, layer: str) -> list[str]:
    """Returns the other layers that share this layer's weight."""
    weight, tied = f"{layer}.weight", model.all_tied_weights_keys
    source = tied.get(weight, weight)
    group = {source, *(target for target, of in tied.items() if of == source)}
    return sorted(name.removesuffix(".weight") for name in group - {weight}) if len(group) > 1 else []


class Replaced:
    """Replaces layers of a model by layers with low-bit weights from its files; layers tied to one of them share its
    weight.

    Attributes:
        shared: maps the name of each layer that shares a weight to the name of the layer that owns it.
    """

    def __init__(self, model: Any, stored: Mapping[str, tuple[Format, Mapping[str, Tensor]]]) -> None:
        """Replaces the model's layers; `stored` has the format and the "meta" tensors of each layer in the files."""
        # A layer with its own weight in the files is not tied.
        self.shared = {other: name for name in stored for other in tied_to(model, name) if other not in stored}
        for name, (form, tensors) in stored.items():
            model.set_submodule(name, replacement(model.get_submodule(name), form, tensors))
        for name, source in self.shared.items():
            model.set_submodule(name, replacement(model.get_submodule(name), stored[source][0], {}))
        handled = {f"{name}.weight" for name in (*self.shared, *stored)}
        tied = model.all_tied_weights_keys
        handled_ties = {target: source for target, source in tied.items() if {target, source} & handled}
        # The library's ties, for unpacking the model again. Two layers with their own weights in the files were not
        # tied.
        shared = {f"{name}.weight" for name in self.shared}
        self._ties = {target: source for target, source in handled_ties.items() if {target, source} & shared}
        for target in handled_ties:
            del tied[target]

    def pack(self, model: nn.Module, activations: str | None) -> None:
        """Packs the loaded tensors. Raises ValueError, with the layer's name, if a tensor does not fit.

        `activations` of these layers are "float" or "int8"; None: as in the settings.
        """
        layers = quantized_layers(model)
        for layer in layers.values():
            layer.activations = activations
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
        """Replaces low-bit layers by plain ones with the same weights, in this dtype, tied as before."""
        # The library may pass the name that it stores in a configuration.
        kind: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._unpack(model, list(quantized_layers(model)), kind)

    def unpack(self, model: Any, layers: Collection[nn.Module]) -> None:
        """As `dequantize`, for some layers and those that share their weights."""
        memory = {layer.packed.qweight.data_ptr() for layer in layers if isinstance(layer, QuantizedWeight)}
        found = quantized_layers(model).items()
        self._unpack(model, [name for name, layer in found if layer.packed.qweight.data_ptr() in memory], None)

    def _unpack(self, model: Any, names: Collection[str], dtype: torch.dtype | None) -> None:
        for name in names:
            layer = model.get_submodule(name)
            model.set_submodule(name, (layer if dtype is None else layer.to(dtype)).dequantize())
        self.shared = {name: source for name, source in self.shared.items() if name not in names}
        weights = {f"{name}.weight" for name in names}
        ties = {target: source for target, source in self._ties.items() if target in weights}
        if ties:
            model.all_tied_weights_keys |= ties
            model.tie_weights(recompute_mapping=False)
