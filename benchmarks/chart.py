"""Results as pictures.

`png` shows how many times as fast as the library each backend of each workload is, with the seconds. `rates_png` shows
how many new tokens each makes in a second.
"""

from __future__ import annotations

import io
import itertools
import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.backends import SUBJECT
from benchmarks.measure import format_seconds
from benchmarks.record import Record

_FASTER, _SLOWER, _MISSED, _OTHER = "#2a6f97", "#b08968", "#ae2012", "#9aa0a6"
# What the libraries call themselves, by the names of the backends.
_NAMES = {
    "transformers": "Transformers",
    "transformers-compile": "Transformers, compiled",
    "fairseq": "FairSeq",
    "ctranslate2": "CTranslate2",
    "openvino": "OpenVINO",
    "llama.cpp": "llama.cpp",
    "fastgen": "FastGen",
    "fastgen-hooks": "FastGen, no captured step",
    "fastgen-fairseq-plain": "FastGen, torch's products",
}
_WIDTH = 11  # inches
_NARROW = 7  # of the chart of tokens per second, which is on a page that telephones show


def png(about: dict[str, Any], records: list[Record]) -> bytes | None:
    """The chart of the workloads that have a ratio; None if there are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Operators gain far more than models do and get a scale of their own. Imports are not two ways to do the same.
    panels = [
        [bar for record in records if "ratio" in record.metrics and record.group in groups for bar in _bars(record)]
        for groups in (("generation", "beams", "pipeline"), ("operator",))
    ]
    panels = [panel for panel in panels if panel]
    if not panels:
        return None
    heights = [0.9 + sum(bar.height for bar in panel) * 0.42 for panel in panels]
    figure = _figure(0.5 + sum(heights))
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw(axes, panel)
    figure.suptitle(_title(about, records), fontsize=9)
    return _saved(figure)


def rates_png(about: dict[str, Any], records: list[Record]) -> bytes:
    """The chart of new tokens per second, with a part for each of these workloads of generation.

    The numbers that it shows are also written into the file, for `shown_rates`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    heights = [0.6 + 0.24 * len(rates(record)) for record in records]
    figure = _figure(0.6 + sum(heights), _NARROW)
    grid = figure.subplots(len(records), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, record in zip(grid[:, 0], records, strict=True):
        _draw_rates(axes, record)
    figure.suptitle(_title(about, records, 90) + "\nnew tokens per second", fontsize=9)
    return _saved(figure, {"Description": json.dumps(all_rates(records))})


def sessions_png(title: str, sessions: list[tuple[str, dict[str, float]]]) -> bytes:
    """The chart of sessions: how many times as fast as the library each backend ran the same calls.

    The numbers that it shows are also written into the file, for `shown_rates`.

    Args:
        sessions: by model, the times as fast of each backend by its name, FastGen the last one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure(0.6 + 0.55 * len(sessions), _NARROW)
    axes = figure.subplots()
    most = max(max(found.values()) for _, found in sessions)
    for number, (_, found) in enumerate(sessions):
        for place, (name, times) in enumerate(found.items()):
            colour = _FASTER if name == "FastGen" else _OTHER
            axes.barh(number + 0.4 * (place - 0.5), times, color=colour, height=0.38)
            axes.bar_label(axes.containers[-1], [f"{name} {times:.1f}"], padding=3, fontsize=8)
    axes.axvline(1, color=_SLOWER, linewidth=1)
    axes.set_yticks(range(len(sessions)), [model for model, _ in sessions], fontsize=8)
    axes.set_xlim(0, most * 1.25)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 100)), fontsize=9)
    return _saved(figure, {"Description": json.dumps(dict(sessions))})


def rates(record: Record) -> dict[str, float]:
    """New tokens per second of each backend, over all sequences that a caller gets.

    In the order of the tables: the library alone, other libraries, FastGen.
    """
    parameters = record.parameters
    sequences = parameters["batch"] * parameters["options"].get("num_return_sequences", 1)
    names = sorted(record.backends, key=lambda name: (name.startswith(SUBJECT), name != record.baseline))
    return {name: sequences * parameters["new_tokens"] / record.backends[name]["median"] for name in names}


def all_rates(records: list[Record]) -> dict[str, dict[str, float]]:
    """Those of each workload by its title, to a tenth of a token."""
    return {record.title: {name: round(rate, 1) for name, rate in rates(record).items()} for record in records}


def shown_rates(path: Path) -> dict[str, dict[str, float]]:
    """What a chart that `rates_png` made shows, as `all_rates` returns it."""
    from PIL import Image  # which matplotlib needs

    with Image.open(path) as image:
        return json.loads(image.info["Description"])


def _draw_rates(axes: Any, record: Record) -> None:
    found = rates(record)
    names, values = list(found), list(found.values())
    colours = [_FASTER if n.startswith(SUBJECT) else _SLOWER if n == record.baseline else _OTHER for n in names]
    bars = axes.barh([_shown(name) for name in names], values, color=colours, height=0.7)
    axes.invert_yaxis()  # the first one is on top
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=7.5)
    axes.set_xlim(0, max(values) * 1.15)
    axes.set_title("\n".join(textwrap.wrap(record.title, 70)), fontsize=9, loc="left")
    axes.tick_params(labelsize=7.5)
    axes.spines[["top", "right"]].set_visible(False)


def _shown(backend: str) -> str:
    """The name of a backend as its library spells it: "openvino-int8" is "OpenVINO, int8"."""
    known = max((name for name in _NAMES if f"{backend}-".startswith(f"{name}-")), key=len, default=None)
    if known is None:
        return backend
    rest = backend.removeprefix(known).lstrip("-")
    return f"{_NAMES[known]}, {rest}" if rest else _NAMES[known]


def _figure(height: float, width: float = _WIDTH) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, metadata: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    # What is drawn outside of the axes is in the picture, too.
    figure.savefig(buffer, format="png", dpi=130, metadata=metadata, bbox_inches="tight", pad_inches=0.1)
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
                bars.append(_Bar(record, backend, baseline / found["median"], _shown(backend), 0.7))
    return bars


def _draw(axes: Any, bars: list[_Bar]) -> None:
    """The bars from top to bottom, with what each stands for written behind it."""
    ends = list(itertools.accumulate(bar.height for bar in bars))
    places = [end - bar.height / 2 for end, bar in zip(ends, bars, strict=True)]
    ratios = [bar.ratio for bar in bars]
    axes.barh(places, ratios, color=[_colour(bar) for bar in bars], height=[bar.height * 0.66 for bar in bars])
    axes.set_yticks(places, ["\n".join(textwrap.wrap(bar.label, 60)) for bar in bars])
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


def _title(about: dict[str, Any], records: list[Record], width: int = 130) -> str:
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    dtypes = sorted({record.parameters["dtype"] for record in records if "dtype" in record.parameters})
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    text = (
        f"{where}, {settings['threads']} threads, {', '.join(dtypes) or 'float32'}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, fastgen {versions['fastgen']}"
    )
    return "\n".join(textwrap.wrap(text, width))
