"""Which models in this process have low-bit weights: what `fastgen.status()` says of them."""

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
    return [line for model in list(_formats) if (line := described(model)) is not None]


def described(model: nn.Module) -> str | None:
    """A line about a model whose weights are kept in their bits; None for any other."""
    form = _formats.get(model)
    layers = [each for each in model.modules() if isinstance(each, QuantizedWeight) and each.bits is not None]
    if form is None or not layers:
        return None
    distinct = {layer.packed.qweight.data_ptr(): layer for layer in layers}.values()  # tied ones count once
    size = sum(layer.nbytes for layer in distinct)
    full = sum(layer.n * layer.k * 4 for layer in distinct)
    *some, last = (str(bits) for bits in sorted({layer.bits or 0 for layer in layers}))
    bits = f"{', '.join(some)} and {last}" if some else last
    return (
        f"{type(model).__name__} read from {form}: {len(layers)} layers of {bits} bits in {size / 2**20:.1f} MiB, "
        f"{full / 2**20:.1f} MiB in float32"
    )
