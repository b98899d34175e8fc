"""Overload: three times as many requests as the server can answer, for a minute.

It must refuse the rest with 429 and say when to come again, keep what it accepts within twice the latency budget, not
grow, and answer as before when the load is over.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving import models, report, schedulers, servers
from benchmarks.serving.load import Load, Seen, run
from benchmarks.serving.report import Row
from benchmarks.serving.servers import Server
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


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Runs it, and writes what it has shown."""
    rows = []
    for name in options.only:
        rows.append(_measured(name, folder / name, options))
        print(report.table(rows[-1:], COLUMNS), flush=True)
        report.write(options.out, "overload", rows, report.table(rows, COLUMNS))


def _measured(name: str, folder: Path, options: argparse.Namespace) -> Row:
    if name == "bert":
        model, path = models.bert_base(folder, num_hidden_layers=options.layers), "/v1/embeddings"
        bodies: list[Any] = schedulers.bodies()
    else:
        model, path = models.translator(folder), "/v1/completions"
        common = {"model": name, "num_beams": BEAMS, "max_tokens": MOST_TOKENS}
        bodies = [{**common, "prompt": text} for text in models.sentences(1000)]
    with servers.fastgen_serve(name, model, "--slo-ms", str(options.slo_ms)) as server:
        load = Load(f"{server.url}{path}", bodies, options.seconds / 4, clients=CLIENTS)
        capacity = report.of(run(load))["answered"]
        load.seconds, load.rate = options.seconds, TIMES * capacity
        with _watched(server, options.seconds / 10) as memory:
            seen = run(load)
        load.seconds, load.rate = options.seconds / 4, None
        after = report.of(run(load))
        alive = server.is_alive
    return {
        "model": name,
        "capacity": capacity,
        **report.of(seen),
        **_accepted(seen),
        "budget": options.slo_ms / 1000,
        "retry_after": _told(seen),
        "grown": (memory[-1] - memory[len(memory) // 2]) / MIB,
        "recovered": after["p95"],
        "alive": alive,
    }


def _accepted(seen: Seen) -> Row:
    """Percentiles of all that was answered, from the beginning on."""
    latencies = [answer.latency for answer in seen.answers if answer.status in (0, 200)]
    return {f"p{percent}": report.percentile(latencies, percent) for percent in report.PERCENTILES}


def _told(seen: Seen) -> str:
    refused = [answer for answer in seen.answers if answer.status == 429]
    return f"{sum(answer.retry_after is not None for answer in refused)} of {len(refused)}"


@contextmanager
def _watched(server: Server, every: float) -> Iterator[list[int]]:
    """Bytes of memory that the server has, every so many seconds."""
    found, done = [server.memory()], threading.Event()

    def watch() -> None:
        while not done.wait(every):
            found.append(server.memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.append(server.memory())
