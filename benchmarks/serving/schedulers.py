"""TurboTransformers' setting: BERT-base's shape, lengths of 2 to 100 tokens, Poisson arrivals, and the schedulers over
one encoder (Fang et al., "TurboTransformers", PPoPP 2021, section 6.3).

* none: no batches; naive: what waits, in order; hungry and lazy: dynamic programming.
* "left out": FastGen computes no padding. "computed": batches are padded (`FASTGEN_PADDING=exact`).

Each scheduler first gets 64 clients that wait for their answers, which says how much it can do. Then requests come by
themselves, at parts of that rate. The highest rate at which latency stays level counts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.encoders import FIRST_WORD, VOCABULARY, uniform
from benchmarks.serving import models, report, servers
from benchmarks.serving.load import Load, run
from benchmarks.serving.report import Row

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


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Runs it, and writes what it has shown."""
    model = models.bert_base(folder / "bert", num_hidden_layers=options.layers)
    rows: list[Row] = []
    summary: list[Row] = []
    for padding, scheduler in itertools.product(options.padding, options.only):
        found = _measured(model, padding, scheduler, options)
        rows += found
        print(report.table(found, COLUMNS), flush=True)
        summary = summarised(rows)
        text = report.table(summary, SUMMARY) + "\n" + report.table(rows, COLUMNS)
        pictures = [_picture(rows, each) for each in dict.fromkeys(row["padding"] for row in rows)]
        for padding_name, picture in pictures:
            name = f"schedulers-{padding_name.replace(' ', '-')}"
            report.write(options.out, name, rows, text, picture)
    print(report.table(summary, SUMMARY))


def _picture(rows: Sequence[Row], padding: str) -> tuple[str, bytes]:
    shown = [row for row in rows if row["padding"] == padding and row["part"]]
    return padding, report.curves(shown, "scheduler", f"BERT-base, 2 to 100 tokens, padding {padding}")


def bodies(count: int = 2000) -> list[Any]:
    """Requests for vectors of random tokens."""
    import torch

    generator = torch.Generator().manual_seed(1)
    texts = (
        torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator).tolist() for length in uniform(count)
    )
    return [{"model": "bert", "input": [tokens], "encoding_format": "base64"} for tokens in texts]


def _measured(model: Path, padding: str, scheduler: str, options: argparse.Namespace) -> list[Row]:
    words = ["--scheduler", scheduler, "--max-waiting", "100000"]
    words += ["--slo-ms", str(options.slo_ms)] if scheduler == "lazy" else []
    rows = []
    with servers.fastgen_serve("bert", model, *words, environment=PADDING[padding]) as server:
        load = Load(f"{server.url}/v1/embeddings", bodies(), options.seconds, clients=CLIENTS)
        closed = report.of(run(load))
        rows.append({"padding": padding, "scheduler": scheduler, "part": None, **closed})
        for part in options.parts:
            load.clients, load.rate = None, part * closed["answered"]
            rows.append({"padding": padding, "scheduler": scheduler, "part": part, **report.of(run(load))})
    return rows


def summarised(rows: Sequence[Row]) -> list[Row]:
    """For each scheduler what it can do, beside the others with the same padding."""
    made: dict[tuple[str, str], Row] = {}
    for padding, scheduler in dict.fromkeys((row["padding"], row["scheduler"]) for row in rows):
        own = [row for row in rows if (row["padding"], row["scheduler"]) == (padding, scheduler)]
        level = [row for row in own if row["part"] and row["level"]]
        best = max(level, key=lambda row: row["answered"], default=None)
        capacity = next(row["answered"] for row in own if not row["part"])
        made[padding, scheduler] = {"padding": padding, "scheduler": scheduler, "capacity": capacity}
        made[padding, scheduler] |= {"level": best and best["answered"], "p95": best and best["p95"]}
    for (padding, scheduler), row in made.items():
        for other in ("none", "naive"):
            there = made.get((padding, other), {}).get("level")
            row[f"over_{other}"] = row["level"] / there if there and row["level"] else None
        naive = made.get((padding, "naive"))
        if naive and naive["level"]:
            own = [each for each in rows if (each["padding"], each["scheduler"]) == (padding, scheduler)]
            row["equal_p95"] = rate_at([each for each in own if each["part"]], naive["p95"]) / naive["level"]
    return list(made.values())


def rate_at(rows: Sequence[Row], p95: float) -> float:
    """The highest rate at which the 95th percentile is no more than that; between measurements, on straight lines."""
    points = sorted((row["asked"], row["p95"]) for row in rows)
    best = points[0][0] if points and points[0][1] <= p95 else 0.0
    for (rate, low), (next_rate, high) in itertools.pairwise(points):
        if low <= p95:
            part = 1.0 if high <= p95 else (p95 - low) / (high - low)
            best = max(best, rate + part * (next_rate - rate))
    return best
