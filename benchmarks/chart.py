"""Results as a picture: how many times as fast each workload is, with the seconds of both sides."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from benchmarks.measure import format_seconds
from benchmarks.record import Record

_FASTER, _SLOWER, _MISSED = "#2a6f97", "#b08968", "#ae2012"


def png(about: dict[str, Any], records: list[Record]) -> bytes | None:
    """The chart of the workloads that have a ratio; None if there are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Imports are not faster or slower ways to do the same.
    shown = [record for record in records if "ratio" in record.metrics and record.group != "import"]
    if not shown:
        return None
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ratios = [record.metrics["ratio"] for record in shown]
    axes.barh(range(len(shown)), ratios, color=[_colour(record) for record in shown], height=0.66)
    axes.set_yticks(range(len(shown)), [record.title for record in shown], fontsize=9)
    axes.invert_yaxis()
    # Operators gain far more than models do; on a linear axis they would leave nothing to see of the others.
    if max(ratios) > 12:
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *ratios) * 0.9, max(ratios) * 6)
    else:
        axes.set_xlim(0, max(max(ratios), 1.0) * 1.45)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, record in enumerate(shown):
        baseline, subject = (record.sides[side]["median"] for side in (record.baseline, record.subject))
        text = f"{record.metrics['ratio']:.2f}×   {format_seconds(baseline)} → {format_seconds(subject)}"
        if record.identical is False:
            text += "   NOT IDENTICAL"
        axes.annotate(
            text, (record.metrics["ratio"], place), (6, 0), textcoords="offset points", va="center", fontsize=9
        )
        for target in record.targets:
            bound = (target["metric"], target["applies"]) == ("ratio", True) and target["bound"].startswith("at least")
            if bound:
                wanted = float(target["bound"].split()[2])
                axes.plot([wanted, wanted], [place - 0.4, place + 0.4], color="black", linewidth=1.5, linestyle=":")
    axes.set_xlabel("times as fast as the unpatched library (medians; dotted: target)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(about), fontsize=9, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _colour(record: Record) -> str:
    if record.identical is False or any(target["met"] is False for target in record.targets):
        return _MISSED
    return _FASTER if record.metrics["ratio"] >= 1 else _SLOWER


def _title(about: dict[str, Any]) -> str:
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    text = (
        f"{where}, {settings['threads']} threads, fp32; torch {versions['torch']}, transformers "
        f"{versions['transformers']}, fastgen {versions['fastgen']}"
    )
    return "\n".join(textwrap.wrap(text, 130))
