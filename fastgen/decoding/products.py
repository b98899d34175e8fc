"""The products of a linear layer: FastGen's own or torch's, in float32, in half precision or with other weights.

Which is chosen for a model's own type is a matter of `Settings.linear_products`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import counters, settings
from fastgen.decoding.narrow_weights import NarrowLines, NarrowPanels, NarrowProduct, NarrowProducts, type_of
from fastgen.decoding.operations import Operation, Place
from fastgen.ops import dot_linear, linear, narrow_linear, quantized_linear, split_linear, widened_linear

HALF = (torch.float16, torch.bfloat16)
_CPU = torch.device("cpu")
# Those of torch that layers multiply with.
OPERATORS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_DOTS = torch.ops.fastgen.dot_linear_out.default
_STREAMED = torch.ops.fastgen.streamed_linear_out.default
_FOLDED = torch.ops.fastgen.folded_linear_out.default
_SPLIT = torch.ops.fastgen.split_linear_out.default
_WIDENED = widened_linear.widened_linear_out
_GROUPED = torch.ops.fastgen.grouped_linear.default
# What executes several of a kind that have the same input.
_SEVERAL = {
    _DOTS: torch.ops.fastgen.dot_linears_out.default,
    _STREAMED: torch.ops.fastgen.streamed_linears_out.default,
    _FOLDED: torch.ops.fastgen.folded_linears_out.default,
}
# A shape is measured when it has been used so often: a short call must not wait for a measurement.
MEASURED_FROM = 24
# A packed weight must take less time by this part to be packed for: less is not worth a copy of it. In layers in half
# precision, so must FastGen's products to be used: calling them takes a little longer than what is measured.
_MARGIN = 0.05
# From so many rows on a weight may be packed for one product alone: with fewer, packing takes as long as it saves.
_MANY_ROWS = 256
# Up to so many rows dot products are the fixed choice: mostly, they are the fastest.
_DOTS_ROWS = 4


class Gain(NamedTuple):
    """What a product gains."""

    is_faster: bool  # with a packed weight than without, once it is packed
    seconds: float  # that it takes less then, as far as they count for packing it
    streams: bool  # without one, it is fastest with the weight laid out piece by piece
    dots: bool = False  # without one, it is fastest as dot products with the lines of the weight
    splits: bool = False  # without one, it is fastest in parts of bfloat16
    packs: bool = False  # one for this product alone is faster still, in memory that was used before


_NO_GAIN = Gain(False, 0.0, False)


class FixedProducts:
    """FastGen's product for every number of rows, whatever has been measured: the result depends on nothing else.

    In float32 the packed and the streamed product give the same bits. So the number of products so far decides when the
    weight is packed. In another precision, every product needs the packed weight.
    """

    def __init__(self, precision: str, group_size: int = 0, device: torch.device = _CPU) -> None:
        self.precision = precision  # of the packed weight: "fp32", "int8", "int4" or "bf16"
        self.group_size = group_size  # inputs that share a scale, in few bits
        # Bytes of a number, with its share of a scale in float16.
        share = 2 / group_size if group_size else 0.0
        self.itemsize = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + share, "int4": 0.5 + share}[precision]
        is_float32 = precision == "fp32"
        # Of the layers.
        self.types = quantized_linear.types(precision, device) if not is_float32 else (torch.float32,)
        # What packing takes in the unit of `Gain.seconds`, here products with the few rows of a decoding step.
        self.packing = 4.0 if is_float32 else 0.0
        # Without the packed weight a result would not be the one that the user asks for.
        self.must_pack = not is_float32 and settings.current().linear_products == "fixed"
        self._gain = Gain(is_faster=True, seconds=1.0, streams=is_float32)

    def gain(self, rows: int) -> Gain:
        return self._gain

    def pack(self, weight: Tensor) -> Any:
        """The weight, [outputs, inputs], packed for `multiply`."""
        if self.precision != "fp32":
            return quantized_linear.pack(weight, self.precision, self.group_size)
        # With its own number of outputs: a weight that replaces another may have more or fewer.
        return linear.pack(weight), weight.shape[0]

    def multiply(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """The layer's result."""
        if self.precision != "fp32":
            return quantized_linear.quantized_linear(x, packed, bias)
        panels, outputs = packed
        return linear.packed_linear(x, panels, bias, outputs)

    def stream(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same in float32 with the weight as it is."""
        return linear.streamed_linear(x, weight, bias)


class _Uses:
    """How often a shape has been used with how many rows."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    def are_enough(self, rows: int) -> bool:
        """Counts another use. Whether the shape may be measured now."""
        # The rows get fewer when inputs are finished; what is about as many is one case.
        about = rows.bit_length()
        uses = self._uses[about] = self._uses.get(about, 0) + 1
        return uses >= MEASURED_FROM


class HalfProducts:
    """The product in float16 or bfloat16 for layers of one shape, by the number of rows.

    Few rows are multiplied as dot products, more of them in float32; either where it is faster than torch's product.
    """

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self._shape = inputs, outputs, dtype
        self._uses = _Uses()
        self._is_faster: dict[int, bool] = {}

    def faster(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor] | None:
        """What multiplies these (`x, weight, bias`); None for torch, and as long as it is not known."""
        rows = x.numel() // x.shape[-1]
        if dot_linear.serves(x, weight, bias):
            return dot_linear.dot_linear if self._is_known_to_be_faster(rows, dot_linear.costs) else None
        if widened_linear.serves(x, weight, bias):
            return widened_linear.widened_linear if self._is_known_to_be_faster(rows, widened_linear.costs) else None
        return None

    def _is_known_to_be_faster(self, rows: int, costs: Callable[..., tuple[float, float] | None]) -> bool:
        if rows not in self._is_faster:
            found = costs(rows, *self._shape, measure=self._uses.are_enough(rows))
            if found is None:
                return False
            plain, own = found
            self._is_faster[rows] = own < (1 - _MARGIN) * plain
        return self._is_faster[rows]


class MeasuredProducts(FixedProducts):
    """The fastest product in float32 for the layers of one shape, by the number of rows."""

    def __init__(self, inputs: int, outputs: int, transposed: bool) -> None:
        super().__init__("fp32")
        self._shape = inputs, outputs, transposed
        self._uses = _Uses()
        self._gains: dict[int, Gain] = {}
        self.packing = float("inf")

    def gain(self, rows: int) -> Gain:
        """What a product with so many rows gains; nothing as long as it is not known."""
        known = self._gains.get(rows)
        if known is not None:
            return known
        may_measure = self._uses.are_enough(rows)
        costs = linear.costs(rows, *self._shape, measure=may_measure)
        split = self._split(rows, may_measure)
        if costs is None or split is None:
            return _NO_GAIN
        self.packing = costs.packing + costs.keeping
        packed_once = costs.packing + costs.packed if rows >= _MANY_ROWS else math.inf
        without = (costs.plain, costs.dots, split, costs.streamed)
        best = without.index(min(without))  # the first of equal ones
        unpacked = min(*without, packed_once)
        saved = unpacked - costs.packed
        seconds = saved if saved > _MARGIN * unpacked else 0.0
        packs = packed_once < min(without)
        self._gains[rows] = Gain(saved > 0.0, seconds, streams=best == 3, dots=best == 1, splits=best == 2, packs=packs)
        return self._gains[rows]

    def stream(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear.folded_linear(x, weight, bias)

    def _split(self, rows: int, may_measure: bool) -> float | None:
        """Seconds of the product in parts of bfloat16; None as long as it is not known."""
        inputs, outputs, transposed = self._shape
        if transposed or rows < split_linear.MIN_ROWS or not split_linear.is_available():
            return math.inf
        costs = split_linear.costs(rows, inputs, outputs, measure=may_measure)
        return None if costs is None else costs.split


class Product(NamedTuple):
    """A product of FastGen's that writes to memory that is there: `operator(result, x, weight, bias)`."""

    operator: Any
    result: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None


class GroupedProduct(NamedTuple):
    """The same with a weight in few bits: its parts, and numbers that are the same for products with the same x."""

    result: Tensor
    x: Tensor
    parts: tuple[Tensor | None, ...]  # numbers, scales, zeros, minimums
    order: Tensor | None
    bias: Tensor | None
    sizes: tuple[int, int, bool, bool]  # bits, group size, whether groups are rotated, and activations stay floats


AnyProduct = Product | GroupedProduct | NarrowProduct


def input_of(operation: Operation) -> Any:
    """Where the input of a product lies; None for an operator that is none."""
    if operation.function in OPERATORS:
        return operation.leaves[-2]
    return operation.leaves[0] if operation.function is _GROUPED else None


def together(works: Sequence[Any]) -> list[Any]:
    """What executes products with one input, of which none reads what another one writes; anything else as it is."""
    narrow = [work for work in works if isinstance(work, NarrowProduct)]
    if narrow:
        rest = [work for work in works if not isinstance(work, NarrowProduct)]
        wide = [work.wide for work in narrow]
        return [NarrowProducts(narrow, together(wide), [_alone(work) for work in wide]), *together(rest)]
    works = _alike(works)
    for kind in filter(None, map(_kind, works)):
        alike = [work for work in works if _kind(work) == kind]
        if len(alike) > 1:
            rest = [work for work in works if not any(work is each for each in alike)]
            return [_call(alike), *together(rest)]
    return [_alone(work) for work in works]


def _alike(works: Sequence[Any]) -> Sequence[Any]:
    """Products that could be one call are chosen together, as one with all of their outputs.

    A few outputs may be multiplied faster in another way than many, but not faster than as a part of them.
    """
    some = [work for work in works if isinstance(work, Product) and work.operator in _SEVERAL]
    if len({work.operator for work in some}) < 2:
        return works
    outputs = sum(work.weight.shape[0] for work in some)
    shares = [_shares(each.x, each.weight, each.bias, outputs) for each in some]
    slowest = {operator: max(share[operator] for share in shares) for operator in shares[0] if operator in _SEVERAL}
    best = min(slowest, key=slowest.__getitem__)
    if slowest[best] == math.inf:  # none serves all of them
        return works
    return [work._replace(operator=best) if any(work is each for each in some) else work for work in works]


def _kind(work: Any) -> Any:
    """Products with the same one can be one call; None for what cannot."""
    if isinstance(work, GroupedProduct):
        return (_GROUPED, *work.sizes) if work.order is None else None
    is_known = isinstance(work, Product) and work.operator in _SEVERAL
    return (work.operator, work.weight.stride(1)) if is_known else None


def _call(products: Sequence[Any]) -> Callable[[], object]:
    """Of several products of one kind."""
    first, columns = products[0], list(map(list, zip(*products, strict=True)))
    if isinstance(first, GroupedProduct):
        results, _, parts, _, biases, _ = columns
        lists = [list(part) for part in zip(*parts, strict=True)]
        operator = torch.ops.fastgen.grouped_linears_out.default
        return partial(operator, results, first.x, *lists, None, biases, *first.sizes)
    _, results, _, weights, biases = columns
    return partial(_SEVERAL[first.operator], results, first.x, weights, biases)


def _alone(work: Any) -> Any:
    if isinstance(work, GroupedProduct):
        operator = torch.ops.fastgen.grouped_linear_out.default
        return partial(operator, work.result, work.x, *work.parts, work.order, work.bias, *work.sizes)
    return partial(work[0], *work[1:]) if isinstance(work, Product) else work


def of(operation: Operation, args: Sequence[Any], result: Tensor, written: frozenset[int]) -> AnyProduct | None:
    """`faster`, for an operator that writes its result there; None for one that is no product, or stays torch's.

    Args:
        args: of the operator.
        written: the storages that its recording writes to: a weight in one of these changes from step to step.
    """
    if operation.function is _GROUPED:
        x, *parts, order, bias, _, bits, group_size, rotated, floats = args
        return GroupedProduct(result, x, tuple(parts), order, bias, (bits, group_size, rotated, floats))
    if operation.function not in OPERATORS:
        return None
    x, weight, bias = args[-2], args[-1].t(), args[0] if len(args) == 3 else None
    wide, place = faster(result, x, weight, bias), operation.leaves[-1]
    if not isinstance(place, Place) or place.storage in written:
        return wide
    kind = _narrow(wide, x, weight, bias)
    if kind is None:
        return wide
    if wide is None:  # then torch's is faster, and writes there, too
        wide = partial(operation.function.overloadpacket.out, *args, out=result)
    return NarrowProduct(wide, result, x, kind.of(weight), bias)


def faster(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Product | None:
    """A product that takes less time than torch's, with the weight as it is, if there is one.

    x is [rows, inputs], the weight [outputs, inputs], the result [rows, outputs]. The shape is measured if need be,
    but with `linear_products="fixed"` shape and type alone decide.
    """
    if settings.current().packed_weights == "never":  # which says that products are torch's own
        return None
    if not weight.numel() or (bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous())):
        return None
    if settings.current().linear_products == "fixed":
        operator = _fixed(x, weight, bias)
        return None if operator is None else Product(operator, result, x, weight, bias)
    operator, share = min(_shares(x, weight, bias, weight.shape[0]).items(), key=lambda item: item[1])
    return Product(operator, result, x, weight, bias) if share < 1.0 else None


def _narrow(
    wide: Product | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> type[NarrowLines] | type[NarrowPanels] | None:
    """The copy in 16 bits that a product reads, if the weight has one and it is faster.

    Args:
        wide: the product that is fastest with the weight as it is.
    """
    now = settings.current()
    if now.packed_weights == "never" or not weight.numel():
        return None
    is_fixed = now.linear_products == "fixed"  # then what has the same bits, whether there is a copy or not
    narrow = type_of(x, weight, bias)
    if narrow is None:
        return None
    if is_fixed:
        return NarrowLines if are_dots(wide) else NarrowPanels if wide is not None else None
    costs = narrow_linear.costs(*x.shape, weight.shape[0], narrow)
    return NarrowPanels if costs is not None and costs.narrow < (1 - _MARGIN) * costs.wide else None


def are_dots(product: Product | None) -> bool:
    """Whether it is that of dot products with the lines of the weight."""
    return product is not None and product.operator is _DOTS


def _fixed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """FastGen's product in float32, where its bits depend on no other row and no number of threads."""
    if not (x.dtype is weight.dtype is torch.float32 and linear.has_vectors() and x.stride(1) == 1):
        return None
    is_for_dots = x.shape[0] <= _DOTS_ROWS and dot_linear.serves(x, weight, bias)
    return _DOTS if is_for_dots else _STREAMED


def _shares(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> dict[Any, float]:
    """What each product takes as a share of the time of torch's, if such a weight had so many outputs."""
    return {
        _DOTS: _share_by_dots(x, weight, bias, outputs),
        _FOLDED: _share_folded(x, weight, outputs),
        _WIDENED: _share_widened(x, weight, bias, outputs),
        _SPLIT: _share_split(x, weight, bias, outputs),
    }


def _share_by_dots(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> float:
    if x.stride(1) != 1 or not dot_linear.serves(x, weight, bias):
        return math.inf
    if x.dtype is not torch.float32:
        found = dot_linear.costs(*x.shape, outputs, x.dtype)
        return math.inf if found is None else found.dots / found.plain
    costs = _costs(x, weight, outputs)
    share = math.inf if costs is None else costs.dots / costs.plain
    # As long as torch's is better: several of them can be one call, and weights that come from farther away than those
    # that are measured are read faster.
    return min(share, 1 - 1e-6) if share < 1 + _MARGIN else share


def _share_folded(x: Tensor, weight: Tensor, outputs: int) -> float:
    if not (x.dtype is weight.dtype is torch.float32 and linear.is_available() and x.stride(1) == 1):
        return math.inf
    costs = _costs(x, weight, outputs)
    return math.inf if costs is None else costs.streamed / costs.plain


def _costs(x: Tensor, weight: Tensor, outputs: int) -> linear.Costs | None:
    return linear.costs(*x.shape, outputs, transposed=weight.stride(1) != 1)


def _share_widened(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> float:
    if not widened_linear.serves(x, weight, bias):
        return math.inf
    costs = widened_linear.costs(*x.shape, outputs, x.dtype)
    return math.inf if costs is None else costs.widened / costs.plain


def _share_split(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> float:
    if x.stride(1) != 1 or not split_linear.serves(x, weight, bias):
        return math.inf
    costs = split_linear.costs(*x.shape, outputs)
    return math.inf if costs is None else costs.split / costs.plain


def precision_on(device: torch.device) -> str:
    """The precision of packed weights that the user asks for, if this device is fast in it."""
    wanted = settings.current().weight_dtype
    if not quantized_linear.is_for(device):
        return "fp32"
    measure = settings.current().linear_products == "measured"
    reason = quantized_linear.unavailable(wanted, measure, device) if wanted != "fp32" else None
    if reason is None:
        return wanted
    counters.count_fallback(f"{wanted} weights", reason)
    return "fp32"
