"""`--weight-dtype`: what it changes, what it does not, and what it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen import settings
from fastgen.decoding import layers
from fastgen.ops.linear import choose
from fastgen.pipeline import SetupError, generate_dataset
from fastgen_cli.generate import main, parse

FAST = ["--num-beams", "2", "--max-new-tokens", "5", "--device", "cpu", "--batch-size", "4", "--quiet"]


def call(*words: Any) -> int:
    return main([str(word) for word in words])


@pytest.fixture(autouse=True)
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers count as well, and the processor as fast."""
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    monkeypatch.setattr(choose, "unavailable", lambda precision, *asked: choose.missing(precision))


def outputs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_other_weights_are_used_and_counted(bart: Path, inputs: Path, tmp_path: Path) -> None:
    before, found, stats = settings.current(), {}, {}
    for precision in ("fp32", *choose.PRECISIONS):
        if precision != "fp32" and choose.missing(precision):
            pytest.skip(choose.missing(precision) or "")
        out, report = tmp_path / f"{precision}.jsonl", tmp_path / f"{precision}.json"
        import fastgen

        fastgen.reset_stats()
        assert call(bart, inputs, out, *FAST, "--report", report, "--weight-dtype", precision) == 0
        found[precision] = [output["scores"] for output in outputs(out)]
        stats[precision] = json.loads(report.read_text())["fastgen"]["stats"]
        assert settings.current() == before
    assert not any("weights" in name for name in stats["fp32"])
    for precision in choose.PRECISIONS:
        assert stats[precision][f"{precision} weights"] == {"accelerated": 10, "fallback": {}}
        assert found[precision] != found["fp32"]
        near = [abs(a[0] - b[0]) < 0.2 * abs(a[0]) for a, b in zip(found["fp32"], found[precision], strict=True)]
        assert sum(near) > (0.5 if precision == "int4" else 0.8) * len(near)


def test_weights_that_stay_as_they_are_are_told_of(
    bart: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fastgen

    loud = [word for word in FAST if word != "--quiet"]
    fastgen.reset_stats()
    assert call(bart, inputs, tmp_path / "used.txt", *loud, "--weight-dtype", "int8") == 0
    assert "no int8 weights" not in capsys.readouterr().err
    monkeypatch.setattr(layers, "MIN_WEIGHT", 2**18)
    fastgen.reset_stats()
    assert call(bart, inputs, tmp_path / "small.txt", *loud, "--weight-dtype", "int8") == 0
    told = "; no int8 weights: the model has no linear layer of at least 65536 weights that it serves\n"
    assert capsys.readouterr().err.endswith(told)
    monkeypatch.setattr(choose, "unavailable", lambda *asked: "this processor is not fast")
    fastgen.reset_stats()
    assert call(bart, inputs, tmp_path / "slow.txt", *loud, "--weight-dtype", "bf16") == 0
    assert capsys.readouterr().err.endswith("; no bf16 weights: this processor is not fast\n")


def test_what_it_cannot_be(bart: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(bart, inputs, tmp_path / "out.txt", *FAST, "--weight-dtype", "int2") == 2
    said = capsys.readouterr().err
    assert said.startswith("fastgen-generate: weight_dtype ") and "'int2'; known: fp32, int8, int4, bf16" in said
    with settings.changed(packed_weights="never"):
        assert call(bart, inputs, tmp_path / "out.txt", *FAST, "--weight-dtype", "int8") == 2
    said = capsys.readouterr().err
    assert said.startswith("fastgen-generate: weight_dtype ") and "packed_weights must not be never" in said


def test_old_names_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the option, however it is written, and of the environment variable."""
    told, option = "fastgen-generate: DeprecationWarning: ", "--cpu-weights is now called --weight-dtype\n"
    for words, said in (
        (["--cpu-weights", "bf16"], told + option),
        (["--cpu_weights=bf16"], told + option),
        (["--weight-dtype", "bf16"], ""),
    ):
        given, _ = parse(["model", "in.txt", "out.txt", *words])
        assert given["weight_dtype"] == "bf16" and "cpu_weights" not in given
        assert capsys.readouterr().err == said
    monkeypatch.setenv("FASTGEN_CPU_WEIGHTS", "bf16")
    parse(["model", "in.txt", "out.txt"])
    assert capsys.readouterr().err == f"{told}FASTGEN_CPU_WEIGHTS is now called FASTGEN_WEIGHT_DTYPE\n"


def test_the_old_name_of_the_argument(bart: Path, inputs: Path, tmp_path: Path) -> None:
    options = {"limit": 2, "generation": {"max_new_tokens": 3}, "device": "cpu", "quiet": True, "workers": 0}
    with pytest.warns(DeprecationWarning, match="cpu_weights is now called weight_dtype") as told:
        generate_dataset(bart, inputs, tmp_path / "out.txt", cpu_weights="fp32", **options)
    assert [warning.filename for warning in told if warning.category is DeprecationWarning] == [__file__]
    with pytest.warns(DeprecationWarning), pytest.raises(SetupError, match="weight_dtype .* is 'int2'"):
        generate_dataset(bart, inputs, tmp_path / "other.txt", cpu_weights="int2", **options)
    with pytest.raises(TypeError, match="cpu_weights is the old name of weight_dtype"):
        generate_dataset(bart, inputs, tmp_path / "other.txt", cpu_weights="int8", weight_dtype="int8", **options)
