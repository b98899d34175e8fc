"""What the clients saw as numbers, tables and pictures."""

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
_WARM = 0.2  # the part of a load at its beginning that does not count
Row = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of them do not exceed; infinite for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("inf")


def latencies(answers: Sequence[Answer]) -> Row:
    """Percentiles of latency, in seconds. A refusal has none."""
    good = [answer.latency for answer in answers if answer.status in (0, 200)]
    return {f"p{percent}": percentile(good, percent) for percent in (50, 95, 99)}


def of(answers: Sequence[Answer], seconds: float, warm: float = _WARM) -> Row:
    """The numbers of a load: what was asked and answered in a second, and latencies.

    Args:
        seconds: of the load.
        warm: the part of it at its beginning that does not count.
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
    """Whether a server keeps up: it answers what it is asked, and latency does not grow from third to third."""
    third = len(counted) // 3
    if not third or done < 0.9 * len(counted) or any(not answer.is_good for answer in counted):
        return False
    first, last = ([answer.latency for answer in part] for part in (counted[:third], counted[-third:]))
    return statistics.median(last) <= 1.5 * statistics.median(first)


def first_tokens(answers: Sequence[Answer], seconds: float, percent: float, warm: float = _WARM) -> float:
    """Seconds until the first text of a stream, but of those that begin together at the beginning of the load."""
    streams = [answer for answer in answers if answer.is_good and answer.due >= warm * seconds]
    return percentile([answer.first - answer.due for answer in streams if answer.first is not None], percent)


def shown(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Rows as a table.

    Args:
        columns: what a column is called, by the name of its value.
    """
    return table(list(columns.values()), [[_text(row.get(name)) for name in columns] for row in rows]) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def curves(rows: Sequence[Row], by: str, title: str) -> bytes:
    """The 50th and 95th percentiles of latency against what was asked in a second, a colour for each value of `by`.

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
    """Writes NAME.json, with what the numbers depend on, and NAME.md. What is named `_...` is not written."""
    folder.mkdir(parents=True, exist_ok=True)
    about = machine.about(torch.device("cpu")) | {"commit": machine.commit()}
    kept = [{column: value for column, value in row.items() if not column.startswith("_")} for row in rows]
    write_whole(folder / f"{name}.json", (json.dumps({**about, "rows": kept}, indent=1) + "\n").encode())
    write_whole(folder / f"{name}.md", text.encode())
