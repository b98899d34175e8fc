"""Summarises the clients' answers in numbers, tables and charts."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.chart import new_figure, saved
from benchmarks.results import write_whole
from benchmarks.serving.load import Answer
from benchmarks.tables import table

_COLOURS = ("#b08968", "#9aa0a6", "#2a6f97", "#61a5c2", "#606c38", "#bc4749")
_WARM = 0.2  # the initial share of a load that does not count
Row = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value that this percentage of them does not exceed; infinity if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("inf")


def latencies(answers: Sequence[Answer]) -> Row:
    """Returns percentiles of latency, in seconds. Refusals do not count."""
    good = [answer.latency for answer in answers if answer.status in (0, 200)]
    return {f"p{percent}": percentile(good, percent) for percent in (50, 95, 99)}


def of(answers: Sequence[Answer], seconds: float, warm: float = _WARM) -> Row:
    """Returns the numbers of a load: requests and answers per second, and latencies.

    Args:
        seconds: of the load.
        warm: its initial share, which does not count.
    """
    begin, counted_seconds = warm * seconds, (1 - warm) * seconds
    counted = [answer for answer in answers if begin <= answer.due < seconds]
    done = [answer for answer in answers if answer.is_good and begin <= (answer.end or 0) < seconds]
    return {
        "asked": len(counted) / counted_seconds,
        "answered": len(done) / counted_seconds,
        **latencies(counted),
        "level": is_level(counted, len(done)),
        "statuses": dict(Counter(answer.status for answer in counted)),
    }


def is_level(counted: Sequence[Answer], done: int) -> bool:
    """Returns whether a server keeps up: it answers its requests, and latency does not grow from third to third."""
    third = len(counted) // 3
    if not third or done < 0.9 * len(counted) or any(not answer.is_good for answer in counted):
        return False
    first, last = ([answer.latency for answer in part] for part in (counted[:third], counted[-third:]))
    return statistics.median(last) <= 1.5 * statistics.median(first)


def first_tokens(answers: Sequence[Answer], seconds: float, percent: float, warm: float = _WARM) -> float:
    """Returns the seconds to a stream's first text, excluding the streams that start together with the load."""
    streams = [answer for answer in answers if answer.is_good and answer.due >= warm * seconds]
    return percentile([answer.first - answer.due for answer in streams if answer.first is not None], percent)


def shown(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Formats rows as a table.

    Args:
        columns: titles of columns, by the names of their values.
    """
    return table(list(columns.values()), [[_text(row.get(name)) for name in columns] for row in rows]) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def curves(rows: Sequence[Row], by: str, title: str) -> bytes:
    """Plots the 50th and 95th percentiles of latency against the request rate, in a colour for each value of `by`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(3.6)
    axes = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(row[by] for row in rows))
    for panel, percent in zip(axes, (50, 95), strict=True):
        for name, colour in zip(names, _COLOURS, strict=False):
            points = [(row["asked"], row[f"p{percent}"]) for row in rows if row[by] == name]
            panel.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=name, markersize=3)
        panel.set_yscale("log")
        panel.set_xlabel("requests per second", fontsize=8)
        panel.set_title(f"{percent}th percentile of latency, seconds", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    return saved(figure, rows)


def write(folder: Path, name: str, rows: Sequence[Row], text: str) -> None:
    """Writes NAME.json, with the machine and versions, and NAME.md. Omits columns named `_...`."""
    folder.mkdir(parents=True, exist_ok=True)
    about = machine.about(torch.device("cpu")) | {"commit": machine.commit()}
    kept = [{column: value for column, value in row.items() if not column.startswith("_")} for row in rows]
    write_whole(folder / f"{name}.json", (json.dumps({**about, "rows": kept}, indent=1) + "\n").encode())
    write_whole(folder / f"{name}.md", text.encode())
