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

    # Operators gain far more than models do and get a scale of their own. Imports are not two ways to do the same.
    panels = [
        [record for record in records if "ratio" in record.metrics and record.group in groups]
        for groups in (("generation", "pipeline"), ("operator",))
    ]
    panels = [panel for panel in panels if panel]
    if not panels:
        return None
    heights = [0.9 + 0.42 * len(panel) for panel in panels]
    figure = Figure(figsize=(11, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw(axes, panel)
    figure.suptitle(_title(about), fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _draw(axes: Any, records: list[Record]) -> None:
    """One bar for each record, with what it stands for written behind it."""
    ratios = [record.metrics["ratio"] for record in records]
    places = range(len(records))
    axes.barh(places, ratios, color=[_colour(record) for record in records], height=0.66)
    axes.set_yticks(places, [record.title for record in records], fontsize=9)
    axes.set_ylim(len(records) - 0.4, -0.6)
    if max(ratios) > 20:
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *ratios), max(ratios) * 10)
    else:
        axes.set_xlim(0, max(*ratios, 1.0) * 1.45)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, record in zip(places, records, strict=True):
        baseline, subject = (record.sides[side]["median"] for side in (record.baseline, record.subject))
        text = f"{record.metrics['ratio']:.2f}×   {format_seconds(baseline)} → {format_seconds(subject)}"
        if record.identical is False:
            text += "   NOT IDENTICAL"
        axes.annotate(
            text,
            (record.metrics["ratio"], place),
            (8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
        for target in record.targets:
            if target["metric"] == "ratio" and target["applies"] and target["at_least"] is not None:
                axes.plot([target["at_least"]] * 2, [place - 0.42, place + 0.42], color="black", linestyle=":")
    axes.set_xlabel("times as fast as unpatched; dotted: target; red: target missed, or not identical", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


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
