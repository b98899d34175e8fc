"""The products of a linear layer: FastGen's own or torch's, in float32 or with a weight of another type.

In float32 the fastest is chosen, by timings and by the number of products so far, or FastGen's is always used
(`Settings.linear_products`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fastgen.ops import linear, quantized_linear
from fastgen.ops.quantized_linear import QuantizedWeight

# A shape is measured when it has been used so often: a short call must not wait for a measurement.
MEASURED_FROM = 24
# A packed weight must take less time by this part to be packed for: less is not worth a copy of it.
_MARGIN = 0.05


class Gain(NamedTuple):
    """What a product gains.

    Attributes:
        is_faster: with a packed weight than without, once it is packed.
        seconds: that it takes less then, as far as they count for packing it.
        streams: without one, it is faster here than torch's.
    """

    is_faster: bool
    seconds: float
    streams: bool = False


NO_GAIN = Gain(False, 0.0)


class Float32Products:
    """Products in float32. The packed and the streamed product give the same bits; torch's gives others.

    Attributes:
        precision: of the packed weight.
        itemsize: bytes of an element of it.
        packing: what packing takes, in the unit of `Gain.seconds`.
    """

    precision = "fp32"
    itemsize = 4
    packing: float

    def gain(self, rows: int) -> Gain:
        """What a product with so many rows gains."""
        raise NotImplementedError

    def pack(self, weight: Tensor) -> Any:
        """The weight, [outputs, inputs], packed for `multiply`."""
        # With its own number of outputs: a weight that replaces another may have more or fewer.
        return linear.pack(weight), weight.shape[0]

    def multiply(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """The layer's result."""
        panels, outputs = packed
        return linear.packed_linear(x, panels, bias, outputs)


class FixedProducts(Float32Products):
    """FastGen's product for every number of rows, whatever has been measured: the result depends on nothing else.

    When the weight is packed depends on the number of products so far. That changes the time only.
    """

    packing = 4.0  # products: about what packing takes, with the few rows of a decoding step

    def gain(self, rows: int) -> Gain:
        return Gain(is_faster=True, seconds=1.0, streams=True)


class MeasuredProducts(Float32Products):
    """The fastest product for the layers of one shape, by the number of rows."""

    def __init__(self, inputs: int, outputs: int, transposed: bool) -> None:
        self._shape = inputs, outputs, transposed
        self._uses: dict[int, int] = {}
        self._gains: dict[int, Gain] = {}
        self.packing = float("inf")

    def gain(self, rows: int) -> Gain:
        """What a product with so many rows gains; nothing as long as it is not known."""
        known = self._gains.get(rows)
        if known is not None:
            return known
        # The rows get fewer when inputs are finished; what is about as many is one case.
        about = rows.bit_length()
        uses = self._uses[about] = self._uses.get(about, 0) + 1
        costs = linear.costs(rows, *self._shape, measure=uses >= MEASURED_FROM)
        if costs is None:
            return NO_GAIN
        self.packing = costs.packing
        unpacked = min(costs.plain, costs.streamed)
        saved = unpacked - costs.packed
        seconds = saved if saved > _MARGIN * unpacked else 0.0
        self._gains[rows] = Gain(saved > 0.0, seconds, streams=costs.streamed < costs.plain)
        return self._gains[rows]


class QuantizedProducts:
    """The same in a precision that the user has asked for: from the first product on, whatever the shape."""

    packing = 0.0

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.itemsize = 1 if precision == "int8" else 2

    def gain(self, rows: int) -> Gain:
        return Gain(True, 1.0)

    def pack(self, weight: Tensor) -> QuantizedWeight:
        return quantized_linear.pack(weight, self.precision)

    def multiply(self, x: Tensor, packed: QuantizedWeight, bias: Tensor | None) -> Tensor:
        return quantized_linear.quantized_linear(x, packed, bias)
