"""Results as a picture: how many times as fast as the library each backend of each workload is, with the seconds."""

from __future__ import annotations

import io
import itertools
import textwrap
from typing import Any, NamedTuple

from benchmarks.backends import SUBJECT
from benchmarks.measure import format_seconds
from benchmarks.record import Record

_FASTER, _SLOWER, _MISSED, _OTHER = "#2a6f97", "#b08968", "#ae2012", "#9aa0a6"


def png(about: dict[str, Any], records: list[Record]) -> bytes | None:
    """The chart of the workloads that have a ratio; None if there are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Operators gain far more than models do and get a scale of their own. Imports are not two ways to do the same.
    panels = [
        [bar for record in records if "ratio" in record.metrics and record.group in groups for bar in _bars(record)]
        for groups in (("generation", "beams", "pipeline"), ("operator",))
    ]
    panels = [panel for panel in panels if panel]
    if not panels:
        return None
    heights = [0.9 + sum(bar.height for bar in panel) * 0.42 for panel in panels]
    figure = Figure(figsize=(11, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw(axes, panel)
    figure.suptitle(_title(about, records), fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


class _Bar(NamedTuple):
    """One backend of a workload: how many times as fast as the baseline, and the seconds of both."""

    record: Record
    backend: str
    ratio: float
    label: str
    height: float


def _bars(record: Record) -> list[_Bar]:
    """FastGen first, and below it, thinner, whatever else the same work was done with."""
    baseline = record.backends[record.baseline]["median"]
    bars = [_Bar(record, record.subject, record.metrics["ratio"], record.title, 1.0)]
    if record.group == "generation":
        for backend, found in record.backends.items():
            if backend not in (record.baseline, record.subject):
                bars.append(_Bar(record, backend, baseline / found["median"], backend, 0.7))
    return bars


def _draw(axes: Any, bars: list[_Bar]) -> None:
    """The bars from top to bottom, with what each stands for written behind it."""
    ends = list(itertools.accumulate(bar.height for bar in bars))
    places = [end - bar.height / 2 for end, bar in zip(ends, bars, strict=True)]
    ratios = [bar.ratio for bar in bars]
    axes.barh(places, ratios, color=[_colour(bar) for bar in bars], height=[bar.height * 0.66 for bar in bars])
    axes.set_yticks(places, [bar.label for bar in bars])
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontsize(_font_size(bar))
    axes.set_ylim(ends[-1] + 0.1, -0.1)
    if max(ratios) > 20:
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *ratios), max(ratios) * 10)
    else:
        axes.set_xlim(0, max(*ratios, 1.0) * 1.45)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, bar in zip(places, bars, strict=True):
        axes.annotate(
            _text(bar),
            (bar.ratio, place),
            (8, 0),
            textcoords="offset points",
            va="center",
            fontsize=_font_size(bar),
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
        for target in bar.record.targets if bar.backend == bar.record.subject else ():
            if target["metric"] == "ratio" and target["applies"] and target["at_least"] is not None:
                axes.plot([target["at_least"]] * 2, [place - 0.42, place + 0.42], color="black", linestyle=":")
    axes.set_xlabel(
        "times as fast as unpatched; dotted: target; red: a target missed, or not identical; grey: not FastGen",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _font_size(bar: _Bar) -> float:
    return 9 if bar.height == 1 else 7.5


def _text(bar: _Bar) -> str:
    baseline, own = (bar.record.backends[backend]["median"] for backend in (bar.record.baseline, bar.backend))
    text = f"{bar.ratio:.2f}×   {format_seconds(baseline)} → {format_seconds(own)}"
    if bar.backend == bar.record.subject and bar.record.identical is False:
        text += "   NOT IDENTICAL"
    return text


def _colour(bar: _Bar) -> str:
    record = bar.record
    if bar.backend != record.subject:
        return _FASTER if bar.backend.startswith(SUBJECT) else _OTHER
    if record.identical is False or any(target["met"] is False for target in record.targets):
        return _MISSED
    return _FASTER if record.metrics["ratio"] >= 1 else _SLOWER


def _title(about: dict[str, Any], records: list[Record]) -> str:
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    dtypes = sorted({record.parameters["dtype"] for record in records if "dtype" in record.parameters})
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    text = (
        f"{where}, {settings['threads']} threads, {', '.join(dtypes) or 'float32'}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, fastgen {versions['fastgen']}"
    )
    return "\n".join(textwrap.wrap(text, 130))
