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
from benchmarks.serving.load import Answer, Seen

PERCENTILES = (50, 95, 99)
_COLOURS = ("#b08968", "#9aa0a6", "#2a6f97", "#61a5c2", "#606c38", "#bc4749")
Row = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of them do not exceed; infinite for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("inf")


def of(seen: Seen, warm: float = 0.2) -> Row:
    """The numbers of a load: what was asked and answered in a second, and latencies in seconds.

    Args:
        warm: the part of the load at its beginning that does not count.
    """
    begin, end = warm * seen.seconds, seen.seconds
    counted = [answer for answer in seen.answers if begin <= answer.due < end]
    done = [answer for answer in seen.answers if answer.is_good and begin <= (answer.end or 0) < end]
    good = [answer for answer in counted if answer.status in (0, 200)]  # a refusal has no latency
    latencies = [answer.latency for answer in good]
    return {
        "asked": len(counted) / (end - begin),
        "answered": len(done) / (end - begin),
        **{f"p{percent}": percentile(latencies, percent) for percent in PERCENTILES},
        "level": is_level(counted, len(done)),
        "statuses": dict(Counter(answer.status for answer in counted)),
        "client_cpu": seen.cpu / seen.seconds,
    }


def is_level(counted: Sequence[Answer], done: int) -> bool:
    """Whether a server keeps up: it answers what it is asked, and latency does not grow from third to third."""
    third = len(counted) // 3
    if not third or done < 0.9 * len(counted) or any(not answer.is_good for answer in counted):
        return False
    first, last = ([answer.latency for answer in part] for part in (counted[:third], counted[-third:]))
    return statistics.median(last) <= 1.5 * statistics.median(first)


def first_tokens(seen: Seen, percent: float, warm: float = 0.2) -> float:
    """Seconds until the first text of a stream, but of those that begin together at the beginning of the load."""
    begin = warm * seen.seconds
    streams = [answer for answer in seen.answers if answer.is_good and answer.first is not None and answer.due >= begin]
    return percentile([(answer.first or 0) - answer.due for answer in streams], percent)


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Rows in Markdown.

    Args:
        columns: what a column is called, by the name of its value.
    """
    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[_shown(row.get(name)) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _shown(value: Any) -> str:
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


def about() -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = torch.device("cpu")
    return {
        "machine": machine.describe_machine(cpu),
        "versions": machine.describe_versions(),
        "commit": machine.commit(),
        "threads": torch.get_num_threads(),
    }


def write(folder: Path, name: str, rows: Sequence[Row], text: str, picture: bytes | None = None) -> None:
    """Writes NAME.json, NAME.md and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{name}.json", (json.dumps({**about(), "rows": rows}, indent=1) + "\n").encode())
    write_whole(folder / f"{name}.md", text.encode())
    if picture is not None:
        write_whole(folder / f"{name}.png", picture)
