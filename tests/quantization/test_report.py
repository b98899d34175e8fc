"""The report as a table and as a picture."""

from __future__ import annotations

import io

from rich.console import Console

from fastgen.quantization.report import Layer, Measured, Report, png, table


def report(**changes):
    layers = [Layer(f"model.layers.{number}.mlp.down_proj", 4, 64, number / 100) for number in range(8)]
    values = dict(
        model="some-model", method="gptq", bits=4, group_size=64, symmetric=True, samples=4,
        bytes=Measured(10_000_000, 2_500_000), measure="perplexity", quality=Measured(20.0, 21.0), measured_on=100,
        tokens_per_second=Measured(50.0, None), layers=layers, left_out=["lm_head"], seconds=1.0,
    )  # fmt: skip
    return Report(**(values | changes))


def shown(values):
    console = Console(file=io.StringIO(), width=80)
    console.print(table(values))
    return [" ".join(line.replace("│", " ").split()) for line in console.file.getvalue().splitlines()]


def test_the_table_says_what_changed_and_names_the_largest_errors():
    lines = shown(report())
    assert "weights 10.0 MB 2.5 MB x 0.25" in lines
    assert "perplexity 20.000 21.000 +5.00 %" in lines
    assert "tokens per second 50.0 - -" in lines
    named = [line for line in lines if line.startswith("model.layers.")]
    assert named == [f"model.layers.{number}.mlp.down_proj 4 64 {number}.00 %" for number in (7, 6, 5, 4, 3)]
    assert "mean of all 3.50 %" in lines


def test_bleu_changes_by_points_and_a_long_name_is_not_cut():
    long = "model." + "very_long_name." * 6 + "q_proj"
    lines = shown(report(measure="bleu", quality=Measured(80.5, 80.25), layers=[Layer(long, 8, 32, 0.5)]))
    assert "bleu 80.500 80.250 -0.25" in lines
    assert long in "".join(line.split(" ")[0] for line in lines)


def test_the_picture_is_a_png_and_the_same_every_time():
    values = report(measure=None, layers=[Layer("a", bits, 8, 0.1) for bits in (4, 8)])
    assert png(values).startswith(b"\x89PNG")
    assert png(values) == png(values)
