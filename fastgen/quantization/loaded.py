"""Which models in this process have weights of few bits: what `fastgen.status()` says of them."""

from __future__ import annotations

import weakref

from torch import nn

from fastgen.quantization.layers import QuantizedWeight

_formats: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def note(model: nn.Module, form: str) -> None:
    """The model has been read from this format."""
    _formats[model] = form


def notes() -> list[str]:
    """A line for each such model that is still there, and has not been unpacked since."""
    found = ((model, form, _layers(model)) for model, form in list(_formats.items()))
    return [_described(model, form, layers) for model, form, layers in found if layers]


def _layers(model: nn.Module) -> list[QuantizedWeight]:
    return [module for module in model.modules() if isinstance(module, QuantizedWeight) and module.bits is not None]


def _described(model: nn.Module, form: str, layers: list[QuantizedWeight]) -> str:
    distinct = {layer.packed.numbers.data_ptr(): layer for layer in layers}.values()  # tied ones count once
    size = sum(layer.nbytes for layer in distinct)
    full = sum(layer.outputs * layer.inputs * 4 for layer in distinct)
    bits = " and ".join(str(bits) for bits in sorted({layer.bits or 0 for layer in layers}))
    return (
        f"{type(model).__name__} read from {form}: {len(layers)} layers of {bits} bits in {size / 2**20:.1f} MiB, "
        f"{full / 2**20:.1f} MiB in float32"
    )
