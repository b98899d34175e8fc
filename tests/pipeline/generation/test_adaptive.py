"""`--batching auto`: the files are those of static batches, however the records run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen.engine import continuous as engine
from fastgen.pipeline import SetupError, batches, generate_dataset
from fastgen.pipeline.generation import RunOptions, model
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.generation.model import ModelStage
from fastgen.pipeline.stages import Progress
from tests.pipeline import tiny
from tests.pipeline.generation.slots import assert_same, interrupt_after

pytestmark = pytest.mark.usefixtures("programs")

RECORDS = 24
# The library applies it to padding, too: only prompts of one length share a static batch.
PENALTY = {"max_new_tokens": 16, "repetition_penalty": 1.3}
SAMPLED = {"do_sample": True, **PENALTY}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve records, in windows of 24."""
    monkeypatch.setattr(batches, "RECORDS_OF_A_ROW", 3)
    monkeypatch.setattr(batches, "WINDOW_BATCHES", 6)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each batch has given to the engine."""
    counts, original = list[int](), model.ContinuousStage._serve

    def counted(stage: Any, rows: Any, at_once: int, done: Any) -> Any:
        counts.append(len(rows))
        return original(stage, rows, at_once, done)

    monkeypatch.setattr(model.ContinuousStage, "_serve", counted)
    return counts


def prompts(*lengths: int) -> list[str]:
    """Texts of so many words, each another one."""
    words = " ".join(tiny.sentences(40)).split()
    return [" ".join(words[number : number + length]) for number, length in enumerate(lengths)]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Of twelve lengths."""
    (tmp_path / "in.txt").write_text("\n".join(prompts(*range(1, 13), *range(12, 0, -1))) + "\n")
    return tmp_path / "in.txt"


def run(model: Any, source: Path, output: Any, **options: Any) -> Any:
    defaults = {"generation": PENALTY, "batch_size": 4, "device": "cpu", "quiet": True, "workers": 0}
    return generate_dataset(model, source, output, **{**defaults, **options})


@pytest.mark.parametrize(
    ("generation", "form"),
    [
        (PENALTY, "txt"),
        ({"num_beams": 3, "num_return_sequences": 2, **PENALTY}, "jsonl"),
        ({**PENALTY, "eos_token_id": list(range(2, 40))}, "jsonl"),
        ({"max_length": 40}, "txt"),  # which counts padding
    ],
)
def test_the_same_file_as_static_batches(
    gpt2: Path, generation: dict[str, Any], form: str, inputs: Path, tmp_path: Path, served: list[int]
) -> None:
    options = {"generation": generation, "token_ids": form == "jsonl"}
    static, new = tmp_path / f"static.{form}", tmp_path / f"new.{form}"
    of_static = run(gpt2, inputs, static, batching="static", **options)
    assert served == [] and of_static.batching == "static"
    of_new = run(gpt2, inputs, new, **options)
    assert served == [12, 12] and of_new.batching == "adaptive"
    assert of_static.tokens == of_new.tokens and of_new.samples == RECORDS
    assert_same(new, static)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([3] * 12 + [5] * 9, id="full"), pytest.param([3, 4, 5, 6], id="few"), pytest.param([7], id="one"),
        pytest.param([], id="none"),
    ],
)  # fmt: skip
def test_full_or_few_batches_are_static(gpt2: Path, lengths: list[int], tmp_path: Path, served: list[int]) -> None:
    (tmp_path / "in.txt").write_text("".join("light " * length + "\n" for length in lengths))
    report = run(gpt2, tmp_path / "in.txt", tmp_path / "out.txt")
    run(gpt2, tmp_path / "in.txt", tmp_path / "static.txt", batching="static")
    assert served == [] and report.samples == len(lengths)
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "static.txt").read_bytes()


def test_static_without_slots(
    gpt2: Path, inputs: Path, tmp_path: Path, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. The batches are those of a run with slots, which may be resumed so."""
    run(gpt2, inputs, tmp_path / "slots.txt")
    assert served == [12, 12]
    monkeypatch.setattr(engine.ContinuousBatches, "has_slots", False)
    report = run(gpt2, inputs, tmp_path / "out.txt")
    assert served == [12, 12] and report.batches == 2
    assert (tmp_path / "slots.txt").read_bytes() == (tmp_path / "out.txt").read_bytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "adaptive"), ({"batch_size": "auto"}, "adaptive"), ({"generation": {"max_new_tokens": 8}}, "static"),
        ({"generation": {"max_length": 30}}, "adaptive"), ({"max_tokens": 64}, "static"),
        ({"batching": "static"}, "static"), ({"batching": "continuous"}, "continuous"),
        ({"generation": {"prompt_lookup_num_tokens": 2, **PENALTY}}, "static"),
        ({"self_speculation": "int8"}, "static"),
    ],
)  # fmt: skip
def test_what_may_gain(gpt2: Path, options: dict[str, Any], expected: str) -> None:
    common = {"model": str(gpt2), "input": "-", "output": "-", "device": "cpu", "quiet": True, "generation": PENALTY}
    settings = RunOptions(**{**common, **options})
    assert model.batching_of(load(settings), settings) == expected


def test_an_interrupted_run_ends_in_the_same_file(gpt2: Path, inputs: Path, tmp_path: Path) -> None:
    """Sampled, so that a record which runs another way has another output."""
    options = {"generation": SAMPLED}
    run(gpt2, inputs, tmp_path / "whole.txt", **options)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 12 + 9)
        run(gpt2, inputs, tmp_path / "out.txt", **options)
    with pytest.raises(SetupError, match=r"other settings: rules\.adaptive was true"):
        run(gpt2, inputs, tmp_path / "out.txt", resume=True, batching="static", **options)
    report = run(gpt2, inputs, tmp_path / "out.txt", resume=True, **options)
    assert report.resumed_samples == 12
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()


def test_what_the_engine_refuses_runs_in_static_batches(
    bart: Path, inputs: Path, tmp_path: Path, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has no positions for as many tokens as an output may have; outputs end before."""
    sizes, forward = list[int](), ModelStage.forward
    monkeypatch.setattr(
        ModelStage, "forward", lambda stage, rows, batch: (sizes.append(len(rows)), forward(stage, rows, batch))[1]
    )
    ends = {"eos_token_id": list(range(2, 200))}
    options = {"generation": {"max_new_tokens": 100, "encoder_repetition_penalty": 1.2, **ends}}
    run(bart, inputs, tmp_path / "static.txt", batching="static", **options)
    report = run(bart, inputs, tmp_path / "out.txt", **options)
    static, adaptive = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert static == adaptive
    assert served == [12, 12] and report.samples == RECORDS and report.skipped == 0
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "static.txt").read_bytes()


def test_progress_tells_of_tokens_of_static_batches_too(
    gpt2: Path, tmp_path: Path, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before all of their batch is done."""
    said, add = list[str](), Progress.add

    def noted(progress: Progress, count: int = 1, rate: str = "") -> None:
        said.extend([rate] if count == 4 else [])
        add(progress, count, rate)

    monkeypatch.setattr(Progress, "add", noted)
    (tmp_path / "in.txt").write_text("light light light\n" * 12)
    run(gpt2, tmp_path / "in.txt", tmp_path / "out.txt")
    assert served == [] and len(said) == 3 and not any(rate.startswith("0 tokens") for rate in said)
