"""Overload: three times as many requests as the server can answer, for a minute.

It must refuse the rest with 429 and say when to come again, keep what it accepts within twice the latency budget, not
grow, and answer as before when the load is over.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.serving import models, report, schedulers, servers
from benchmarks.serving.load import Load, run
from benchmarks.serving.report import Row
from benchmarks.serving.service import BEAMS, MOST_TOKENS

TIMES = 3.0
CLIENTS = 16
MIB = 2**20
COLUMNS = {
    "model": "model",
    "capacity": "answered with 16 clients, per second",
    "asked": "asked, per second",
    "answered": "answered, per second",
    "statuses": "statuses",
    "p50": "p50 of what is accepted, s",
    "p95": "p95, s",
    "p99": "p99, s",
    "budget": "budget, s",
    "retry_after": "429 with Retry-After",
    "grown": "MiB grown, second half",
    "recovered": "p95 afterwards, s",
    "alive": "alive",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=("bert", "opus-mt"), default=["opus-mt", "bert"], help="models")
    parser.add_argument("--slo-ms", type=float, default=3000.0, help="latency budget (default: 3000)")
    parser.add_argument("--layers", type=int, default=12, help="of bert (default: 12)")


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for name in options.only:
        if name == "bert":
            model, path = models.bert_base(folder / name, num_hidden_layers=options.layers), "/v1/embeddings"
            bodies: list[Any] = schedulers.bodies()
        else:
            model, path = models.translator(folder / name), "/v1/completions"
            common = {"model": name, "num_beams": BEAMS, "max_tokens": MOST_TOKENS}
            bodies = [{**common, "prompt": text} for text in models.sentences(1000)]
        with servers.fastgen_serve(name, model, "--slo-ms", str(options.slo_ms)) as server:
            url = f"{server.url}{path}"
            closed = Load(url, bodies, options.seconds / 4, clients=CLIENTS)
            capacity = report.of(run(closed), closed.seconds)["answered"]
            opened = Load(url, bodies, options.seconds / 2, rate=TIMES * capacity)
            first, middle = run(opened), server.memory()
            second, end = run(opened), server.memory()
            after = report.of(run(closed), closed.seconds)
            alive = server.is_alive
        told = [answer.retry_after is not None for answer in first + second if answer.status == 429]
        yield {
            "model": name,
            "capacity": capacity,
            **report.of(second, opened.seconds, warm=0.0),
            **report.latencies(first + second),
            "budget": options.slo_ms / 1000,
            "retry_after": f"{sum(told)} of {len(told)}",
            "grown": (end - middle) / MIB,
            "recovered": after["p95"],
            "alive": alive,
        }
