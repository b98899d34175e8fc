"""TurboTransformers' setting: BERT-base's shape, lengths of 2 to 100 tokens, Poisson arrivals, and the schedulers over
one encoder (Fang et al., "TurboTransformers", PPoPP 2021, section 6.3).

* none: no batches; naive: what waits, in order; hungry and lazy: dynamic programming.
* "left out": FastGen computes no padding. "computed": batches are padded (`FASTGEN_PADDING=exact`).

Each scheduler first gets 64 clients that wait for their answers, which says how much it can do. Then requests come by
themselves, at parts of that rate. The highest rate counts up to which latency stays level at all rates. Lazy has a
latency budget, in which so many cannot be answered: the parts are those of what hungry, which makes the same batches,
can do.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write_whole
from benchmarks.serving import models, report, servers
from benchmarks.serving.load import Load, run
from benchmarks.serving.report import Row
from benchmarks.workloads.encoders import FIRST_WORD, VOCABULARY, uniform

SCHEDULERS = ("none", "naive", "hungry", "lazy")
PADDING = {"left out": {}, "computed": {"FASTGEN_PADDING": "exact"}}
CLIENTS = 64
COLUMNS = {
    "padding": "padding",
    "scheduler": "scheduler",
    "part": "part of capacity",
    "asked": "asked, per second",
    "answered": "answered, per second",
    "p50": "p50, s",
    "p95": "p95, s",
    "p99": "p99, s",
    "level": "level",
}
SUMMARY = {
    "padding": "padding",
    "scheduler": "scheduler",
    "capacity": "64 clients, per second",
    "level": "level up to, per second",
    "p95": "p95 there, s",
    "over_none": "times no batches",
    "over_naive": "times naive",
    "equal_p95": "times naive at its p95",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=SCHEDULERS, default=list(SCHEDULERS), help="schedulers")
    parser.add_argument("--padding", nargs="+", choices=list(PADDING), default=list(PADDING))
    parser.add_argument("--parts", nargs="+", type=float, default=[0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1], metavar="PART")
    parser.add_argument("--slo-ms", type=float, default=1000.0, help="latency budget of lazy (default: 1000)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: 12)")


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    model = models.bert_base(folder / "bert", num_hidden_layers=options.layers)
    capacities = dict[str, float]()
    for padding, scheduler in itertools.product(options.padding, options.only):
        common = {"padding": padding, "scheduler": scheduler}
        words = ["--scheduler", scheduler, "--max-waiting", "100000"]
        words += ["--slo-ms", str(options.slo_ms)] if scheduler == "lazy" else []
        with servers.fastgen_serve("bert", model, *words, environment=PADDING[padding]) as server:
            load = Load(f"{server.url}/v1/embeddings", bodies(), options.seconds, clients=CLIENTS)
            closed: Row = {"answered": None}
            if scheduler != "lazy" or padding not in capacities:
                closed = report.of(run(load), load.seconds)
                capacities[padding] = closed["answered"]
            yield {**common, "part": None, **closed}
            for part in options.parts:
                load.rate = part * capacities[padding]
                yield {**common, "part": part, **report.of(run(load), load.seconds)}


def write_summary(folder: Path, rows: Sequence[Row]) -> None:
    """Prints the summary, and writes it and a chart for each padding."""
    text = report.shown(summarised(rows), SUMMARY)
    print(text)
    write_whole(folder / "schedulers.md", f"{text}\n{report.shown(rows, COLUMNS)}".encode())
    for padding in dict.fromkeys(row["padding"] for row in rows):
        shown = [row for row in rows if row["padding"] == padding and row["part"]]
        picture = report.curves(shown, "scheduler", f"BERT-base, 2 to 100 tokens, padding {padding}")
        write_whole(folder / f"schedulers-{padding.replace(' ', '-')}.png", picture)


def bodies(count: int = 2000) -> list[Any]:
    """Returns requests for vectors of random tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = uniform(count).tolist()
    texts = (torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator).tolist() for length in lengths)
    return [{"model": "bert", "input": [tokens], "encoding_format": "base64"} for tokens in texts]


def summarised(rows: Sequence[Row]) -> list[Row]:
    """Returns the throughput of each scheduler, compared with the others with the same padding."""
    made: dict[tuple[str, str], Row] = {}
    for key, group in itertools.groupby(rows, lambda row: (row["padding"], row["scheduler"])):
        closed, *opened = group
        *_, best = (None, *itertools.takewhile(lambda row: row["level"], sorted(opened, key=lambda row: row["part"])))
        made[key] = {"padding": key[0], "scheduler": key[1], "capacity": closed["answered"], "open": opened}
        made[key] |= {"level": best and best["answered"], "p95": best and best["p95"]}
    for (padding, _), row in made.items():
        for other in ("none", "naive"):
            there = made.get((padding, other), {}).get("level")
            row[f"over_{other}"] = row["level"] / there if there and row["level"] else None
        naive = made.get((padding, "naive"))
        if naive and naive["level"]:
            row["equal_p95"] = rate_at(row["open"], naive["p95"]) / naive["level"] or None
    return list(made.values())


def rate_at(rows: Sequence[Row], p95: float) -> float:
    """Returns the highest rate with a 95th percentile of at most `p95`, interpolated linearly between measurements."""
    points = sorted((row["asked"], row["p95"]) for row in rows)
    best = points[0][0] if points and points[0][1] <= p95 else 0.0
    for (rate, low), (next_rate, high) in itertools.pairwise(points):
        if low <= p95:
            part = 1.0 if high <= p95 else (p95 - low) / (high - low)
            best = max(best, rate + part * (next_rate - rate))
    return best
