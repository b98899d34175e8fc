"""The server's metrics, in Prometheus' format."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

# Buckets in seconds (the first two), and in inputs.
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_counter, _histogram = partial(Counter, registry=REGISTRY), partial(Histogram, registry=REGISTRY)
REQUESTS = _counter("fastgen_requests", "Requests of HTTP.", ["path", "status"])
LATENCY = _histogram(
    "fastgen_request_seconds", "From a request to the end of its response.", ["path"], buckets=_LATENCIES
)
TOKENS = _counter("fastgen_tokens", "Tokens, read (prompt) and written (generated).", ["model", "kind"])
FIRST_TOKEN = _histogram(
    "fastgen_time_to_first_token_seconds", "From a job to its first token, of streams.", ["model"], buckets=_LATENCIES
)
TOKEN_TIME = _histogram(
    "fastgen_time_per_token_seconds", "Of each token of a sequence, waiting included.", ["model"], buckets=_STEPS
)
JOBS = _counter("fastgen_jobs", "Jobs of a model: finished, failed, refused, cancelled.", ["model", "outcome"])
IN_FLIGHT = Gauge("fastgen_in_flight", "Sequences that wait or run.", ["model"], registry=REGISTRY)
WAITING = Gauge("fastgen_waiting", "Sequences that wait for a slot.", ["model"], registry=REGISTRY)
CACHE = _counter("fastgen_cache", "Responses looked up in the cache: hit, miss, down.", ["outcome"])
RESTARTS = _counter("fastgen_restarts", "Processes of a model that had died.", ["model"])

# The longest reason, in characters, that is used as a label.
_LONGEST_REASON = 80

# Keys of `ServedModel.stats()`, and their descriptions.
_GAUGES = {
    "busy": "Slots that are taken.",
    "slots": "Slots.",
    "kv_bytes": "The most K and V of requests at a time.",
    "memory_bytes": "Resident memory of the process of the model.",
}
_COUNTS = {
    "steps": "Decode steps.",
    "row_steps": "Slots of decode steps.",
    "busy_row_steps": "Slots of decode steps that were taken.",
    "batches": "Prefills and static batches.",
    "rows": "Rows of prefills and static batches.",
    "preempted": "Requests that began again for want of room.",
    "shared_positions": "Positions of prompts that others had prefilled.",
    "drafted_tokens": "Tokens of drafts that were verified.",
    "accepted_tokens": "Tokens of drafts that were right.",
}


class EngineStats:
    """Exports the last counts of the models' processes."""

    def __init__(self) -> None:
        self.latest: Mapping[str, Mapping[str, Any]] = {}  # by model

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. The registry calls it."""
        for name, about in _GAUGES.items():
            yield self._family(GaugeMetricFamily, name, about)
        for name, about in _COUNTS.items():
            yield self._family(CounterMetricFamily, name, about)
        reasons = CounterMetricFamily(
            "fastgen_fallbacks", "Calls that ran on the original code, by reason.", labels=["model", "entry", "reason"]
        )
        alone = CounterMetricFamily(
            "fastgen_alone", "Requests in a call of their own, by reason.", labels=["model", "reason"]
        )
        for model, stats in self.latest.items():
            for entry, counts in (stats.get("fastgen") or {}).items():
                for reason, calls in _by_kind(counts.get("fallback")):
                    reasons.add_metric([model, entry, reason], calls)
            for reason, calls in _by_kind(stats.get("alone")):
                alone.add_metric([model, reason], calls)
        yield from (reasons, alone, self._batch_sizes())

    def _batch_sizes(self) -> Metric:
        family = HistogramMetricFamily("fastgen_batch_size", "Inputs of a batch that is encoded.", labels=["model"])
        for model, stats in self.latest.items():
            counts: Mapping[int, int] = stats.get("batch_sizes") or {}
            if counts:
                bounds = (*_SIZES, math.inf)
                within = [sum(count for size, count in counts.items() if size <= bound) for bound in bounds]
                buckets = list(zip(map(floatToGoString, bounds), within, strict=True))
                family.add_metric([model], buckets, sum(size * count for size, count in counts.items()))
        return family

    def _family(self, kind: Any, name: str, about: str) -> Metric:
        family: Any = kind(f"fastgen_engine_{name}", about, labels=["model"])
        for model, stats in self.latest.items():
            if isinstance(stats.get(name), (int, float)):
                family.add_metric([model], stats[name])
        return family


def _by_kind(counts: Mapping[str, int] | None) -> Iterable[tuple[str, int]]:
    """Counts reasons by the text before a colon: after it they quote errors, which are of unlimited variety."""
    found: Counts[str] = Counts()
    for reason, calls in (counts or {}).items():
        found[reason.partition(":")[0][:_LONGEST_REASON]] += calls
    return found.items()


ENGINES = EngineStats()
REGISTRY.register(ENGINES)


def text() -> bytes:
    """Returns all metrics, in Prometheus' format."""
    return generate_latest(REGISTRY)
