"""Draws the charts of the pages: bars of numbers, which the image file also contains."""

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
# Display names of the libraries, by the names of the backends.
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
_WIDTH = 7  # inches: phones must also show the charts
Parts = Mapping[str, Mapping[str, float]]


def bars_png(title: str, parts: Parts) -> bytes:
    """Draws a chart with a panel for each title, and a bar for each backend.

    Also writes the numbers into the file, for `shown`.

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
        axes.invert_yaxis()  # the first one on top
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=7.5)
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_title("\n".join(textwrap.wrap(name, 70)), fontsize=9, loc="left")
        axes.tick_params(labelsize=7.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 90)), fontsize=9)
    return saved(figure, parts)


def shown(path: Path) -> Parts:
    """Returns the numbers in a chart of `bars_png`."""
    from PIL import Image  # matplotlib depends on it

    with Image.open(path) as image:
        return json.loads(image.info["Description"])


def rates(records: list[Record]) -> Parts:
    """Returns new tokens per second of each backend, over all sequences that a caller gets, by the title of the
    workload.

    Rounds to a tenth. In the order of the tables: the library alone, other libraries, FastGen.
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
    """Returns the display name of a backend: "openvino-int8" is "OpenVINO, int8"."""
    known = max((name for name in _NAMES if f"{backend}-".startswith(f"{name}-")), key=len, default=None)
    if known is None:
        return backend
    rest = backend.removeprefix(known).lstrip("-")
    return f"{_NAMES[known]}, {rest}" if rest else _NAMES[known]


def new_figure(height: float) -> Any:
    """Creates a figure as wide as a page, and this many inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def saved(figure: Any, numbers: Any) -> bytes:
    """Returns the image, with its numbers in the file's metadata."""
    buffer = io.BytesIO()
    # Includes drawings outside of the axes.
    about = {"Description": json.dumps(numbers)}
    figure.savefig(buffer, format="png", dpi=130, metadata=about, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()
