"""The charts of the pages: bars of numbers, which are also written into the file of the picture."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping
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
Parts = Mapping[str, Mapping[str, float]]


def bars_png(title: str, parts: Parts) -> bytes:
    """A chart with a part for each of the titles, in which each backend has a bar.

    The numbers that it shows are also written into the file, for `shown`.

    Args:
        parts: numbers by backend, for each title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    heights = [0.6 + 0.24 * len(found) for found in parts.values()]
    figure = new_figure(0.6 + sum(heights))
    grid = figure.subplots(len(parts), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (name, found) in zip(grid[:, 0], parts.items(), strict=True):
        names, values = [_shown(each) for each in found], list(found.values())
        bars = axes.barh(names, values, color=[_colour(each) for each in found], height=0.7)
        axes.invert_yaxis()  # the first one is on top
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=7.5)
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_title("\n".join(textwrap.wrap(name, 70)), fontsize=9, loc="left")
        axes.tick_params(labelsize=7.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 90)), fontsize=9)
    return saved(figure, parts)


def shown(path: Path) -> Parts:
    """What a chart that `bars_png` made shows."""
    from PIL import Image  # which matplotlib needs

    with Image.open(path) as image:
        return json.loads(image.info["Description"])


def rates(records: list[Record]) -> Parts:
    """New tokens per second of each backend, over all sequences that a caller gets, by the title of the workload.

    To a tenth, in the order of the tables: the library alone, other libraries, FastGen.
    """
    found: dict[str, dict[str, float]] = {}
    for record in records:
        parameters = record.parameters
        sequences = parameters["batch"] * parameters["options"].get("num_return_sequences", 1)
        names = sorted(record.backends, key=lambda name: (name.startswith(SUBJECT), name != record.baseline))
        tokens = sequences * parameters["new_tokens"]
        found[record.title] = {name: round(tokens / record.backends[name]["median"], 1) for name in names}
    return found


def _colour(backend: str) -> str:
    if backend.lower().startswith(SUBJECT):
        return _FASTER
    return _SLOWER if backend in ("transformers", "fairseq") else _OTHER


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


def saved(figure: Any, numbers: Any) -> bytes:
    """The picture, with the numbers that it shows written into the file."""
    buffer = io.BytesIO()
    # What is drawn outside of the axes is in the picture, too.
    about = {"Description": json.dumps(numbers)}
    figure.savefig(buffer, format="png", dpi=130, metadata=about, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()
