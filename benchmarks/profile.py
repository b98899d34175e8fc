"""Where the time of a run goes, and the least that it could be: what is shown for a workload that misses a target.

The floor of an operator is the time of what it cannot do without: its multiplications and additions at the rate of the
fastest large product, torch's or FastGen's, or its bytes at the bandwidth of a copy, whichever takes longer, with both
rates taken right after the run. Products and attention over K/V of a known length have one. A product whose weight
stays in a cache can be faster than its floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from benchmarks.measure import copy_bandwidth, seconds_of
from fastgen.ops.linear import gemm

# Operators below this share of the time are added up.
_MIN_SHARE = 0.02
OTHERS = "others"
# Of the product and the copy that the rates are taken from.
_SIZE, _COPY_BYTES = 2048, 2**28
_CPU = torch.device("cpu")

Shape = Sequence[int]
_SEVERAL = ("fastgen::gemv_batch_out", "fastgen::gemm_batch_out")


class Rates(NamedTuple):
    """Floating-point operations, and bytes read and written: of some work, or in a second."""

    operations: float
    bytes: float

    def seconds(self, work: Rates) -> float:
        """The least time for so much."""
        return max(work.operations / self.operations, work.bytes / self.bytes)


class Profile(NamedTuple):
    """Seconds in each operator itself, the largest first, by the name that torch gives it; and the least for each."""

    seconds: dict[str, float]
    floor: dict[str, float]


def profile(run: Callable[[], object], rates: Callable[[], Rates] | None = None) -> Profile:
    """Where the time of a run in float32 on the CPU goes.

    What takes a small part is under `OTHERS`. The time between the operators (Python) is in none of them, and the
    profiler itself takes some.

    Args:
        rates: of the machine; measured by default.
    """
    activities = [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True, record_shapes=True) as profiler:
        run()
    limit = (rates or measure_rates)()
    seconds: dict[str, float] = {}
    floor: dict[str, float] = {}
    for event in profiler.events():
        seconds[event.name] = seconds.get(event.name, 0.0) + event.self_cpu_time_total / 1e6
        work = work_of(event.name, event.structured_input_shapes or ())
        if work is not None:
            floor[event.name] = floor.get(event.name, 0.0) + limit.seconds(work)
    total = sum(seconds.values())
    large = {name: value for name, value in seconds.items() if value >= _MIN_SHARE * total}
    ordered = dict(sorted(large.items(), key=lambda item: -item[1]))
    return Profile(
        {**ordered, OTHERS: total - sum(large.values())}, {name: floor[name] for name in ordered if name in floor}
    )


@torch.no_grad()
def measure_rates() -> Rates:
    """Those of this machine now, with the number of threads in force."""
    a, b = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    products: list[Callable[[], object]] = [lambda: a @ b]
    if gemm.is_available():
        products.append(lambda: gemm.gemm(a, b, None))
    fastest = min(seconds_of([product], _CPU) for product in products)
    return Rates(2 * _SIZE**3 / fastest, copy_bandwidth(_CPU, _COPY_BYTES))


def work_of(operator: str, shapes: Sequence[Any]) -> Rates | None:
    """Operations and bytes of a call in float32, by the shapes of its arguments ([] for what is no tensor, a list of
    shapes for several); None where it is neither a product nor attention."""
    if operator in ("aten::mm", "aten::bmm"):
        return _product(*shapes[:2])
    if operator in ("aten::addmm", "aten::baddbmm"):
        return _product(*shapes[1:3])
    if operator in ("fastgen::gemv_out", "fastgen::gemm_out"):
        _, rows, (outputs, inputs) = shapes[:3]
        return _product(rows, (inputs, outputs))
    if operator in _SEVERAL:
        _, rows, weights = shapes[:3]
        return _products(rows, [outputs for outputs, _ in weights])
    if operator == "fastgen::panels_gemm_batch_out":
        results, rows = shapes[:2]
        weights = [(rows[-1], outputs) for _, outputs in results]
        works = _products(rows, [outputs for _, outputs in weights])
        return works._replace(bytes=works.bytes - sum(2 * math.prod(weight) for weight in weights))  # of 16 bits
    if operator in ("aten::_scaled_dot_product_flash_attention_for_cpu", "fastgen::shared_prefix_attention"):
        # A suffix of its own does not count: its shape is that of what is allocated, and it is short.
        return _attention(*shapes[:3])
    return None


def _product(a: Shape, b: Shape) -> Rates:
    """[..., M, K] times [..., K, N]"""
    result = (*a[:-1], b[-1])
    return Rates(2 * math.prod(result) * a[-1], 4 * (math.prod(a) + math.prod(b) + math.prod(result)))


def _products(rows: Shape, outputs: Sequence[int]) -> Rates:
    """[M, K] times several [K, N], with N of each: the rows are read once."""
    works = [_product(rows, (rows[-1], each)) for each in outputs]
    read_once = 4 * math.prod(rows) * (len(works) - 1)
    return Rates(sum(work.operations for work in works), sum(work.bytes for work in works) - read_once)


def _attention(query: Shape, keys: Shape, values: Shape) -> Rates:
    """[rows, heads, Q, dim] over [batch, kv heads, N, dim] and [batch, kv heads, N, value dim]"""
    rows, heads, queries, dim = query
    length, width = keys[2], values[3]
    context = rows * heads * queries * width
    operations = 2 * rows * heads * queries * length * (dim + width)
    return Rates(operations, 4 * (math.prod(query) + math.prod(keys) + math.prod(values) + context))
