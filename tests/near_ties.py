"""Tells a near-tie from a fault, where the original code and FastGen give different results.

Two float32 computations of the same thing round differently. Where a search has to choose between two candidates that
are closer than rounding, the two runs may choose differently, and from there on everything differs. That is no fault.
All other differences are.

`check` compares both results, and where they differ, `settle` runs the original code again in float64 (`InFloat64`),
where rounding is nine digits smaller. It looks at every decision of that run: the best tokens, the best sums of beams,
what was drawn, the edges of top-k and top-p, the end of a search. A decision is *close* if its margin in float64 is
below the rounding bound. The run is repeated with close decisions made the other way. **Both float32 results must be
the result of such a run**: the same tokens, the same order of beams and rows, scores and K/V that agree. So a wrong
token, or rows that are exchanged without a tie, stay a failure, whatever else is close in the call.

The rounding bound of a score is

    EPSILON * depth * magnitude

EPSILON is the spacing of float32 at 1. `depth` is the largest number of products (linear layers, matrix products,
attention) between two decisions: each of them adds a relative error of about EPSILON to what passes through, because
the errors of a sum of n terms, of either sign, grow like the root of n, as the sum does. `magnitude` is the largest
number, masks left out, of which a softmax or a decision of the run was made: the softmax turns an absolute error of its
argument into the same absolute error of a log-probability, and the error of a sum of log-probabilities is relative to
it. The bound is an estimate of the usual error, not of the worst one, which would be too large to tell anything.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import fastgen

EPSILON = torch.finfo(torch.float32).eps
# Runs in float64 for one difference. Close decisions are rare: most differences take two or three.
MOST_RUNS = 100
# Numbers of two float32 results agree within these: as much as they are rounded differently in a tiny model.
ATOL, RTOL = 1e-4, 1e-5
# How far the original's numbers may be from those of float64, relative to the largest of their tensor.
SOUND = 1e-3
# The libraries write -1e9, or the smallest number of the type, where a candidate is left out.
_MASKED = 1e8

_PRODUCTS = {"linear", "matmul", "__matmul__", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"}
_COMPARISONS = {"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__"}

# Called with a line about each near-tie; the controller of the test run prints them (see conftest.py).
report: Callable[[str], None] = print


@dataclass(frozen=True, order=True)
class Close:
    """A close decision of a run in float64.

    Attributes:
        key: the number of the decision in the run, and the place in its tensor.
        ratio: its margin as a part of the bound.
        text: what was decided, for people.
    """

    key: tuple[int, ...]
    ratio: float = field(compare=False)
    text: str = field(compare=False)


class InFloat64(TorchFunctionMode):
    """Computes everything in the block in float64, and looks for close decisions.

    Args:
        flips: keys of decisions to make the other way.

    Attributes:
        close: the close decisions of the run, in order.
        depth: the largest number of products between two decisions.
        magnitude: the largest number of which a softmax or a decision was made.
    """

    def __init__(self, flips: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__()
        self.flips = set(flips)
        self.close: list[Close] = []
        self.depth = 1
        self.magnitude = 1.0
        self._products = 0
        self._decisions = 0

    def __enter__(self) -> InFloat64:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.set_default_dtype(self._default)

    @property
    def bound(self) -> float:
        """The rounding bound of the run's scores so far."""
        return EPSILON * self.depth * self.magnitude

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name == "__get__":
            return function(*args, **kwargs)
        args, kwargs = _in_double(name, args, kwargs)
        if name == "float":
            return args[0].double()
        if name in _PRODUCTS:
            self._products += 1
            self.depth = max(self.depth, self._products)
        elif name in ("softmax", "log_softmax"):
            self._see(args[0])
        if name in _COMPARISONS:
            return self._compare(function, *args, **kwargs)
        if name == "_grouped_mm":
            return _grouped_mm(*args, **kwargs)
        decide = {"topk": self._topk, "argmax": self._argmax, "multinomial": self._draw, "sort": self._sort}.get(name)
        if decide is not None and args[0].is_floating_point():
            return decide(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _see(self, values: torch.Tensor) -> None:
        counted = values[values.abs() < _MASKED]
        if counted.numel():
            self.magnitude = max(self.magnitude, float(counted.abs().max()))

    # ---- decisions

    def _topk(
        self, function: Any, x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> Any:
        self._products = 0
        if dim not in (-1, x.dim() - 1) or not largest or not sorted:
            return function(x, k, dim, largest, sorted)
        self._see(x)
        # What a search has finished has -1e9 added, of which float32 keeps multiples of 64.
        x = torch.where(x.abs() < _MASKED, x, x.float().double())
        values, indices = torch.topk(x, k)
        if k < x.shape[-1]:
            # The first candidate that is left out may be exchanged with the last one that is not.
            left_out = x.scatter(-1, indices, -torch.inf).max(dim=-1, keepdim=True)
            values, indices = (torch.cat(both, -1) for both in zip((values, indices), left_out, strict=True))
        indices = self._in_order(values, indices, "candidates")
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    def _argmax(self, function: Any, x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        if dim not in (-1, x.dim() - 1):
            return function(x, dim, keepdim)
        indices = self._topk(torch.topk, x, 1)[1]
        return indices if keepdim else indices.squeeze(-1)

    def _draw(
        self, function: Any, x: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
    ) -> torch.Tensor:
        """The same draw as from float32 probabilities: torch takes the largest quotients by exponential numbers."""
        if replacement and num_samples > 1:
            return function(x.float(), num_samples, replacement, generator=generator)
        quotients = torch.empty(x.shape, dtype=torch.float32, device=x.device).exponential_(1, generator=generator)
        return self._topk(torch.topk, x.log() - quotients.double().log(), num_samples)[1]

    def _sort(self, function: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Sorted hypotheses of one input. The order of a whole vocabulary is no decision."""
        values, indices = function(x, *args, **kwargs)
        if x.dim() == 1:
            self._see(x)
            indices = self._in_order(values, indices, "hypotheses")
        return torch.return_types.sort((values, indices))

    def _in_order(self, values: torch.Tensor, indices: torch.Tensor, what: str) -> torch.Tensor:
        """The indices, with neighbours exchanged whose order is to be decided the other way."""
        number = self._next()
        left, right = values[..., :-1], values[..., 1:]
        indices = indices.clone()
        for index, flipped in self._near(number, left, right, what):
            if flipped:
                here, behind = index, (*index[:-1], index[-1] + 1)
                indices[here], indices[behind] = indices[behind].clone(), indices[here].clone()
        return indices

    def _compare(self, function: Any, left: Any, right: Any) -> Any:
        result = function(left, right)
        if not any(isinstance(side, torch.Tensor) and side.is_floating_point() for side in (left, right)):
            return result
        left, right = torch.broadcast_tensors(torch.as_tensor(left).double(), torch.as_tensor(right).double())
        for index, flipped in self._near(self._next(), left, right, "a limit"):
            if flipped:
                result[index] = ~result[index]
        return result

    def _next(self) -> int:
        self._decisions += 1
        return self._decisions

    def _near(self, number: int, left: torch.Tensor, right: torch.Tensor, what: str) -> Any:
        """The positions where two numbers are close, in order, each with whether to decide the other way.

        Equal numbers are left out: both runs see them as equal, and how ties are broken must be the same.
        """
        margin = (left - right).abs()
        counted = (left.abs() < _MASKED) & (right.abs() < _MASKED)
        for index in map(tuple, ((margin > 0) & (margin <= self.bound) & counted).nonzero().tolist()):
            key = (number, *index)
            text = f"{what} {float(left[index]):.9g} and {float(right[index]):.9g}"
            self.close.append(Close(key, float(margin[index]) / self.bound, text))
            yield index, key in self.flips


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **options: Any) -> torch.Tensor:
    """Each group of rows times its own weight, which torch has in lower precision only."""
    groups = zip([0, *offs.tolist()], offs.tolist(), weights, strict=False)
    return torch.cat([rows[start:end] @ weight for start, end, weight in groups])


def _in_double(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with float64 in place of float32; what is written to stays."""
    kind = torch.float64
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if writes and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        kind = args[0].dtype

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(kind) if value.dtype in (torch.float32, torch.float64) else value
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(map(convert, value))
        return torch.float64 if value is torch.float32 else value

    first, rest = (args[:1], args[1:]) if writes else ((), args)
    return (*first, *map(convert, rest)), {key: convert(value) for key, value in kwargs.items()}


def in_float32(result: Any) -> Any:
    """A result of float64 as one of float32. Objects are changed in place."""
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype == torch.float64 else result
    if isinstance(result, dict):
        for key, value in result.items():
            result[key] = in_float32(value)
        return result
    if type(result) in (list, tuple):
        return type(result)(map(in_float32, result))
    if type(result).__module__.startswith("transformers."):
        for key, value in vars(result).items():
            setattr(result, key, in_float32(value))
        return result
    return torch.float32 if result is torch.float64 else result


# ---- comparing results


# What FairSeq makes of a soft alignment: numbers as text.
_PROBABILITY = re.compile(r"\d\.\d+")


def pairs(original: Any, ours: Any, where: str = "result") -> Iterator[tuple[str, Any, Any]]:
    """The tensors and plain values of two results, side by side; where the structure differs, what differs."""
    if type(ours) is not type(original):
        yield f"type of {where}", type(original), type(ours)
    elif isinstance(original, dict):
        if list(ours) != list(original):
            yield f"keys of {where}", list(original), list(ours)
        for key in original:
            if key in ours:
                yield from pairs(original[key], ours[key], f"{where}.{key}")
    elif isinstance(original, (tuple, list)):
        if len(ours) != len(original):
            yield f"length of {where}", len(original), len(ours)
        for index, (left, right) in enumerate(zip(original, ours, strict=False)):
            yield from pairs(left, right, f"{where}[{index}]")
    elif type(original).__module__.startswith("transformers."):
        # Caches and their layers, states of recurrent models.
        yield from pairs(vars(original), vars(ours), where)
    elif isinstance(original, MethodType):
        yield where, original.__func__, ours.__func__
    elif isinstance(original, str) and _PROBABILITY.fullmatch(original) and _PROBABILITY.fullmatch(ours):
        yield where, torch.tensor(float(original)), torch.tensor(float(ours))
    else:
        yield where, original, ours


def assert_same(original: Any, ours: Any, where: str = "result") -> None:
    """Asserts that two results agree: integers and structure exactly, other numbers within the tolerance."""
    for place, left, right in pairs(original, ours, where):
        if isinstance(left, torch.Tensor):
            assert (right.shape, right.dtype, right.device) == (left.shape, left.dtype, left.device), place
        if isinstance(left, torch.Tensor) and left.is_floating_point():
            torch.testing.assert_close(
                right, left, atol=ATOL, rtol=RTOL, equal_nan=True, msg=lambda m, place=place: f"{place}: {m}"
            )
        elif isinstance(left, torch.Tensor):
            assert right.tolist() == left.tolist(), place
        else:
            assert right == left, place


@dataclass(frozen=True)
class Distance:
    """How far a result is from one of float64.

    Attributes:
        differing: numbers that differ by more than the limit, and integers and parts that are not equal.
        largest: the largest difference of the other numbers, relative to the largest number of their tensor.
    """

    differing: int
    largest: float


def distance(wanted: Any, found: Any, limit: float) -> Distance:
    """Compares a result with one of float64. Numbers may differ by `limit` of the largest number of their tensor."""
    differing, largest = 0, 0.0
    for _, left, right in pairs(wanted, found):
        if not isinstance(left, torch.Tensor):
            differing += left != right
        elif left.shape != right.shape:
            differing += left.numel()
        elif not left.is_floating_point():
            differing += int((left != right).sum())
        elif left.numel():
            # Masks are the smallest number of the type or infinite, which is all the same here.
            left, right = (side.double().clamp(-_MASKED, _MASKED) for side in (left, right))
            counted = left[left.abs() < _MASKED].abs()
            apart = (left - right).abs() / max(1.0, float(counted.max()) if counted.numel() else 0.0)
            apart[left.isnan() & right.isnan()] = 0
            agree = apart <= limit
            differing += int((~agree).sum())
            largest = max(largest, float(apart.where(agree, 0).max()))
    return Distance(differing, largest)


def check(call: Callable[[], Any]) -> Any:
    """Asserts that a call has the same result with the original code and with FastGen, near-ties excepted.

    Args:
        call: runs from the same random state each time, on objects of its own.

    Returns:
        the result of FastGen.
    """
    with fastgen.disabled():
        original = call()
    ours = call()
    try:
        assert_same(original, ours)
    except AssertionError as difference:
        settle(call, original, ours, difference)
    return ours


def settle(call: Callable[[], Any], original: Any, ours: Any, difference: AssertionError) -> None:
    """Raises the difference unless close decisions explain it, which are reported.

    Numbers must be as near to those of float64 as the original's are.

    Args:
        call: runs from the same random state each time; here, the original code.
        original, ours: its result in float32 with the original code, and with FastGen.
        difference: how `original` and `ours` differ.

    Raises:
        AssertionError: one of the two is not the result of any run in which close decisions are made either way.
    """
    search = _Search(call)
    try:
        wanted = search.explain(original, SOUND)
        found = search.explain(ours, max(RTOL, 4 * wanted.distance.largest))
    except LookupError as unexplained:
        raise AssertionError(f"{difference}\nNo near-tie explains it: {unexplained}") from difference
    decisions = {*wanted.flips, *found.flips}
    for close in sorted(decisions, key=lambda close: close.key):
        report(f"{close.text}: {close.ratio:.0%} of the rounding bound")
    if not decisions:
        report(f"numbers {found.distance.largest:.1e} from float64's, the original's {wanted.distance.largest:.1e}")


@dataclass(frozen=True)
class _Explained:
    distance: Distance
    flips: frozenset[Close]


class _Search:
    """Runs of the original code in float64, by the decisions that were made the other way."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._runs: dict[frozenset[Close], tuple[Any, InFloat64]] = {}

    def explain(self, result: Any, limit: float) -> _Explained:
        """The run that has this result. Runs that are nearest to it are gone on from first, by small margins first.

        Raises:
            LookupError: none has it.
        """
        order = itertools.count()
        queue: list[tuple[int, float, int, frozenset[Close]]] = [(0, 0.0, next(order), frozenset())]
        tried = {queue[0][3]}
        nearest, bound = None, 0.0
        for _ in range(MOST_RUNS):
            if not queue:
                break
            *_, flips = heapq.heappop(queue)
            wanted, run = self._run(flips)
            found = distance(wanted, result, limit)
            if not found.differing:
                return _Explained(found, flips)
            nearest, bound = min(nearest or found.differing, found.differing), max(bound, run.bound)
            for close in run.close:
                if close not in flips and (more := flips | {close}) not in tried:
                    tried.add(more)
                    heapq.heappush(queue, (found.differing, sum(each.ratio for each in more), next(order), more))
        raise LookupError(
            f"no decision of a search in float64 that is closer than the rounding bound, {bound:.1e}, leads to this "
            f"result ({len(tried) - len(queue)} runs; the nearest differs in {nearest} values)"
        )

    def _run(self, flips: frozenset[Close]) -> tuple[Any, InFloat64]:
        if flips not in self._runs:
            with fastgen.disabled(), InFloat64(tuple(close.key for close in flips)) as run:
                result = self._call()
            self._runs[flips] = in_float32(result), run
        return self._runs[flips]
