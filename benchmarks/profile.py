"""Where the time of a run goes: what is shown for a workload that misses a target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

# Operators below this share of the time are added up.
_MIN_SHARE = 0.02
OTHERS = "others"


def profile(run: Callable[[], object]) -> dict[str, float]:
    """Seconds in each operator itself, the largest first, by the name that torch gives it.

    What takes a small part is under `OTHERS`. The time between the operators (Python) is in none of them, and the
    profiler itself takes some.
    """
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    seconds: dict[str, float] = {}
    for event in profiler.key_averages():
        seconds[event.key] = seconds.get(event.key, 0.0) + event.self_cpu_time_total / 1e6
    total = sum(seconds.values())
    large = {name: value for name, value in seconds.items() if value >= _MIN_SHARE * total}
    ordered = dict(sorted(large.items(), key=lambda item: -item[1]))
    return {**ordered, OTHERS: total - sum(large.values())}
