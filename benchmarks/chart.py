"""The charts of the pages: new tokens per second (`rates_png`), and times as fast as the library (`sessions_png`)."""

from __future__ import annotations

import io
import json
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.backends import SUBJECT
from benchmarks.record import Record

_FASTER, _SLOWER, _OTHER = "#2a6f97", "#b08968", "#9aa0a6"
# What the libraries call themselves, by the names of the backends.
_NAMES = {
    "transformers": "Transformers",
    "fairseq": "FairSeq",
    "ctranslate2": "CTranslate2",
    "openvino": "OpenVINO",
    "llama.cpp": "llama.cpp",
    "fastgen": "FastGen",
    "fastgen-hooks": "FastGen, no captured step",
    "fastgen-fairseq-plain": "FastGen, torch's products",
}
_WIDTH = 7  # inches: telephones show the pages, too


def rates_png(about: dict[str, Any], records: list[Record]) -> bytes:
    """The chart of new tokens per second, with a part for each of these workloads of generation.

    The numbers that it shows are also written into the file, for `shown_rates`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    heights = [0.6 + 0.24 * len(rates(record)) for record in records]
    figure = new_figure(0.6 + sum(heights))
    grid = figure.subplots(len(records), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, record in zip(grid[:, 0], records, strict=True):
        _draw_rates(axes, record)
    figure.suptitle(_title(about, records) + "\nnew tokens per second", fontsize=9)
    return saved(figure, all_rates(records))


def sessions_png(title: str, sessions: list[tuple[str, dict[str, float]]]) -> bytes:
    """The chart of sessions: how many times as fast as the library each backend ran the same calls.

    The numbers that it shows are also written into the file, for `shown_rates`.

    Args:
        sessions: by model, the times as fast of each backend by its name, FastGen the last one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(0.6 + 0.55 * len(sessions))
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
    return saved(figure, dict(sessions))


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


def new_figure(height: float) -> Any:
    """A figure as wide as a page, and so many inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def saved(figure: Any, shown: Any) -> bytes:
    """The picture, with the numbers that it shows written into the file."""
    buffer = io.BytesIO()
    # What is drawn outside of the axes is in the picture, too.
    figure.savefig(
        buffer, format="png", dpi=130, metadata={"Description": json.dumps(shown)}, bbox_inches="tight", pad_inches=0.1
    )
    return buffer.getvalue()


def _title(about: dict[str, Any], records: list[Record]) -> str:
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    dtypes = sorted({record.parameters["dtype"] for record in records if "dtype" in record.parameters})
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    text = (
        f"{where}, {settings['threads']} threads, {', '.join(dtypes) or 'float32'}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, fastgen {versions['fastgen']}"
    )
    return "\n".join(textwrap.wrap(text, 90))
