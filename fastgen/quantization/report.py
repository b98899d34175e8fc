"""The costs and gains of quantising a model, as values, as a table and as a picture."""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass, field
from typing import Any

_BEFORE, _AFTER, _KINDS = "#9aa0a6", "#2a6f97", "tab10"
_WORST = 5  # layers that the table names


@dataclass
class Layer:
    name: str
    bits: int
    group_size: int
    error: float
    """||(W - Q) X|| / ||W X|| on the calibration inputs X, after the preceding quantised layers."""


@dataclass
class Measured:
    """A value before and after. None: it was not measured."""

    before: float | None
    after: float | None


@dataclass
class Report:
    model: str
    method: str
    bits: int
    group_size: int
    symmetric: bool
    samples: int
    """Number of samples of the calibration text."""
    bytes: Measured
    """Size of the weight files."""
    measure: str | None
    """What `quality` is: perplexity (lower is better), bleu (higher is better), or None."""
    quality: Measured
    measured_on: int
    """Predicted tokens for perplexity, texts for BLEU."""
    tokens_per_second: Measured
    layers: list[Layer]
    left_out: list[str]
    """Linear layers that stay as they are."""
    seconds: float
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def table(report: Report) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    whole = Table(title=escape(f"{report.model}: {_kind(report)}"), title_justify="left")
    for column in ("", "before", "after", "change"):
        whole.add_column(column, justify="left" if not column else "right")
    whole.add_row("weights", *_cells(report.bytes, lambda value: f"{value / 1e6:,.1f} MB", _ratio))
    if report.measure:
        # The change of a perplexity is relative, that of BLEU a number of points.
        change = _percent if report.measure == "perplexity" else lambda values: f"{values.after - values.before:+.2f}"
        whole.add_row(report.measure, *_cells(report.quality, lambda value: f"{value:,.3f}", change))
    whole.add_row("tokens per second", *_cells(report.tokens_per_second, lambda value: f"{value:,.1f}", _ratio))
    worst = Table(title=f"Relative output errors of {len(report.layers)} layers, the largest", title_justify="left")
    worst.add_column("layer", overflow="fold")  # names are never cut
    for column in ("bits", "group", "error"):
        worst.add_column(column, justify="right")
    for layer in sorted(report.layers, key=lambda layer: -layer.error)[:_WORST]:
        worst.add_row(escape(layer.name), str(layer.bits), str(layer.group_size), f"{100 * layer.error:.2f} %")
    mean = sum(layer.error for layer in report.layers) / max(1, len(report.layers))
    worst.add_row("mean of all", "", "", f"{100 * mean:.2f} %")
    return Group(whole, worst, *map(escape, report.notes))


def png(report: Report) -> bytes:
    """Draws the report: what changed, and the error of each layer. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    sides = figure.subplots(1, 2, width_ratios=[1, 2])
    _draw_changes(sides[0], report)
    _draw_layers(sides[1], report)
    figure.suptitle(_title(report), fontsize=10, parse_math=False)
    target = io.BytesIO()
    # The picture does not depend on the time, and includes everything drawn outside the axes.
    figure.savefig(target, format="png", dpi=130, metadata={"Software": None}, bbox_inches="tight")
    return target.getvalue()


def _title(report: Report) -> str:
    """Returns the model's name, without its folders, and what was done."""
    name = report.model.rstrip("/").rpartition("/")[2] or report.model
    return "\n".join(textwrap.wrap(f"{name}: {_kind(report)}", 110))


def _kind(report: Report) -> str:
    of_8 = sum(layer.bits == 8 for layer in report.layers)
    mixed = f", {of_8} of {len(report.layers)} layers with 8 bits" if of_8 > 0 and report.bits == 4 else ""
    symmetry = "symmetric" if report.symmetric else "asymmetric"
    return f"{report.method}, {report.bits} bits, groups of {report.group_size}, {symmetry}{mixed}"


def _cells(values: Measured, shown: Any, change: Any) -> list[str]:
    cells = ["-" if value is None else shown(value) for value in (values.before, values.after)]
    return [*cells, "-" if "-" in cells else change(values)]


def _ratio(values: Any) -> str:
    return f"x {values.after / values.before:.2f}" if values.before else "-"


def _percent(values: Any) -> str:
    return f"{100 * (values.after / values.before - 1):+.2f} %"


def _draw_changes(axes: Any, report: Report) -> None:
    rows = {"weights": report.bytes}
    if report.measure:
        rows[report.measure] = report.quality
    rows["tokens per second"] = report.tokens_per_second
    shown = {name: values for name, values in rows.items() if values.before and values.after is not None}
    for place, (name, values) in enumerate(shown.items()):
        part = float(values.after or 0) / float(values.before or 1)
        axes.barh(place, part, color=_AFTER, height=0.5)
        axes.annotate(f"{name}: x {part:.3f}", (0.02, place - 0.3), fontsize=8, va="bottom")
    axes.axvline(1, color=_BEFORE, linestyle="--", linewidth=1)
    # From top to bottom, as in the table.
    axes.set(yticks=[], xlabel="after, as a part of before", ylim=(len(shown) - 0.4, -0.8))


def _draw_layers(axes: Any, report: Report) -> None:
    from matplotlib import colormaps

    kinds = list(dict.fromkeys(layer.name.rpartition(".")[2] for layer in report.layers))
    colours = colormaps[_KINDS]
    for number, kind in enumerate(kinds):
        points = [
            (place, 100 * layer.error, layer.bits)
            for place, layer in enumerate(report.layers)
            if layer.name.rpartition(".")[2] == kind
        ]
        for bits, marker in ((4, "o"), (8, "^")):
            some = [(place, error) for place, error, of in points if of == bits]
            label = f"{kind}, {bits} bits" if {of for _, _, of in points} == {4, 8} else kind
            if some:
                axes.scatter(*zip(*some, strict=True), s=14, marker=marker, color=colours(number % 10), label=label)
    axes.set(xlabel="layer, first to last", ylabel="relative output error, %", ylim=(0, None))
    axes.legend(fontsize=7, ncols=2)
