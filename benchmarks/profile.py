"""Where the time of a run goes, and the least that it could be: what is shown for a workload that misses a target.

The floor of an operator is the time of what it cannot do without: its multiplications and additions at the rate of a
large product of torch's, or its bytes at the bandwidth of a copy, whichever takes longer, with both rates taken right
after the run. Products and attention have one. A product whose weight stays in a cache can be faster than its floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity

from benchmarks.measure import copy_bandwidth, seconds_of

# Operators below this share of the time are added up.
_MIN_SHARE = 0.02
OTHERS = "others"
# Of the product and the copy that the rates are taken from.
_SIZE, _COPY_BYTES = 2048, 2**28
_CPU = torch.device("cpu")

Shape = Sequence[int]


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
    for event in profiler.key_averages(group_by_input_shape=True):
        seconds[event.key] = seconds.get(event.key, 0.0) + event.self_cpu_time_total / 1e6
        work = work_of(event.key, event.input_shapes)
        if work is not None:
            floor[event.key] = floor.get(event.key, 0.0) + event.count * limit.seconds(work)
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
    return Rates(2 * _SIZE**3 / seconds_of([lambda: a @ b], _CPU), copy_bandwidth(_CPU, _COPY_BYTES))


def work_of(operator: str, shapes: Sequence[Shape]) -> Rates | None:
    """Operations and bytes of a call in float32, by the shapes of its arguments ([] for what is no tensor); None where
    it is neither a product nor attention, or where the profiler does not know its shapes: those of lists."""
    if operator in ("aten::mm", "aten::bmm"):
        return _product(*shapes[:2])
    if operator in ("aten::addmm", "aten::baddbmm"):
        return _product(*shapes[1:3])
    if operator == "fastgen::packed_linear":
        rows, (panels, inputs, width) = shapes[0], shapes[1]
        return _product(rows, (inputs, panels * width))
    if operator == "fastgen::streamed_linear":
        rows, (outputs, inputs) = shapes[:2]
        return _product(rows, (inputs, outputs))
    if operator in ("fastgen::dot_linear_out", "fastgen::streamed_linear_out"):
        _, rows, (outputs, inputs) = shapes[:3]
        return _product(rows, (inputs, outputs))
    if operator in ("aten::_scaled_dot_product_flash_attention_for_cpu", "fastgen::shared_prefix_attention"):
        # A suffix of its own does not count: its shape is that of what is allocated, and it is short.
        return _attention(*shapes[:3])
    return None


def _product(a: Shape, b: Shape) -> Rates:
    """[..., M, K] times [..., K, N]"""
    result = (*a[:-1], b[-1])
    return Rates(2 * math.prod(result) * a[-1], 4 * (math.prod(a) + math.prod(b) + math.prod(result)))


def _attention(query: Shape, keys: Shape, values: Shape) -> Rates:
    """[rows, heads, Q, dim] over [batch, kv heads, N, dim] and [batch, kv heads, N, value dim]"""
    rows, heads, queries, dim = query
    length, width = keys[2], values[3]
    context = rows * heads * queries * width
    operations = 2 * rows * heads * queries * length * (dim + width)
    return Rates(operations, 4 * (math.prod(query) + math.prod(keys) + math.prod(values) + context))
