"""`--batching auto`: the files are those of static batches, however the records run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.engine import continuous as engine
from fastgen.ops import gpu
from fastgen.pipeline import SetupError, batches, generate_dataset
from fastgen.pipeline.generation import RunOptions, continuous
from fastgen.pipeline.generation.loading import load
from tests.pipeline import tiny

RECORDS = 24
# Many tokens that end an output, so that lengths differ much; and none.
UNEVEN = {"max_new_tokens": 16, "eos_token_id": list(range(2, 40))}
EVEN = {"max_new_tokens": 12, "min_new_tokens": 12}


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are programs, as for users: the tests have Triton's kernels interpreted otherwise."""
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve records in windows of 24, for models of any size."""
    monkeypatch.setattr(batches, "RECORDS_OF_A_ROW", 3)
    monkeypatch.setattr(batches, "WINDOW_BATCHES", 6)
    monkeypatch.setattr(continuous, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(continuous, "LEAST_BATCHES", 3)
    monkeypatch.setattr(continuous, "UNEVEN", 0.95)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each batch has given to the engine."""
    counts, original = list[int](), continuous.ContinuousStage._serve

    def counted(stage: Any, rows: Any, slots: int, done: Any) -> Any:
        counts.append(len(rows))
        return original(stage, rows, slots, done)

    monkeypatch.setattr(continuous.ContinuousStage, "_serve", counted)
    return counts


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("\n".join(tiny.sentences(RECORDS)) + "\n")
    return tmp_path / "in.txt"


def run(model: Any, source: Path, output: Any, **options: Any) -> Any:
    defaults = {"generation": UNEVEN, "batch_size": 4, "device": "cpu", "quiet": True, "workers": 0}
    return generate_dataset(model, source, output, **{**defaults, **options})


@pytest.mark.parametrize(
    ("kind", "generation", "form", "is_continuous"),
    [
        ("bart", UNEVEN, "txt", True),
        ("bart", {"num_beams": 3, "num_return_sequences": 2, **UNEVEN}, "jsonl", True),
        ("bart", EVEN, "txt", False),
        ("gpt2", UNEVEN, "jsonl", True),
        ("gpt2", {"num_beams": 2, **EVEN}, "txt", False),
        # Only prompts of one length share a static batch: there is none to look at first.
        ("gpt2", {**EVEN, "repetition_penalty": 1.3}, "txt", True),
    ],
)
def test_the_same_file_as_static_batches(
    kind: str,
    generation: dict[str, Any],
    form: str,
    is_continuous: bool,
    inputs: Path,
    tmp_path: Path,
    served: list[int],
    request: pytest.FixtureRequest,
) -> None:
    model, options = request.getfixturevalue(kind), {"generation": generation, "token_ids": form == "jsonl"}
    static, new = tmp_path / f"static.{form}", tmp_path / f"new.{form}"
    of_static = run(model, inputs, static, batching="static", **options)
    assert served == [] and of_static.batching == "static"
    of_new = run(model, inputs, new, **options)
    assert bool(served) == is_continuous and of_new.batching == "adaptive"
    assert of_static.tokens == of_new.tokens
    if form == "txt":
        assert new.read_bytes() == static.read_bytes()
        return
    rows, expected = ([json.loads(line) for line in path.read_text().splitlines()] for path in (new, static))
    scores = [[row.pop("scores") for row in each] for each in (rows, expected)]
    assert rows == expected and scores[0] == [pytest.approx(each, abs=1e-4) for each in scores[1]]


def test_few_records_and_another_device_are_static(
    bart: Path, inputs: Path, tmp_path: Path, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(bart, inputs, tmp_path / "few.txt", batch_size=12)
    monkeypatch.setattr(engine.ContinuousBatches, "has_slots", False)  # as on a GPU
    run(bart, inputs, tmp_path / "out.txt")
    assert served == [] and (tmp_path / "few.txt").read_bytes() == (tmp_path / "out.txt").read_bytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "adaptive"),
        ({"generation": {"num_beams": 8}}, "adaptive"),
        ({"generation": {"num_beams": 9}}, "static"),
        ({"generation": {"do_sample": True, "num_return_sequences": 9}}, "static"),
        ({"batch_size": "auto"}, "static"),
        ({"max_tokens": 64}, "static"),
        ({"batching": "static"}, "static"),
        ({"batching": "continuous"}, "continuous"),
        ({"generation": {"prompt_lookup_num_tokens": 2}}, "static"),
        ({"self_speculation": "int8"}, "static"),
    ],
)
def test_what_may_gain(gpt2: Path, options: dict[str, Any], expected: str) -> None:
    common = {"model": str(gpt2), "input": "-", "output": "-", "device": "cpu", "quiet": True, "batch_size": 4}
    settings = RunOptions(**common | options)
    assert continuous.batching_of(load(settings), settings) == expected


def test_a_small_model_is_static(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunOptions(model=str(gpt2), input="-", output="-", device="cpu", quiet=True)
    loaded = load(settings)
    weights = sum(weight.numel() for weight in loaded.model.parameters())
    for least, expected in ((weights, "adaptive"), (weights + 1, "static")):
        monkeypatch.setattr(continuous, "LEAST_WEIGHTS", least)
        assert continuous.batching_of(loaded, settings) == expected


def test_an_interrupted_run_ends_in_the_same_file(
    bart: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, so that a record which runs another way has another output."""
    options = {"generation": {"do_sample": True, **UNEVEN}}
    run(bart, inputs, tmp_path / "whole.txt", **options)
    calls, original = 0, engine.call
    for after in (1, 9):

        def interrupted(*args: Any, after: int = after) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return original(*args)

        calls = 0
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "call", interrupted)
            run(bart, inputs, tmp_path / "out.txt", resume=True, **options)
    with pytest.raises(SetupError, match=r"other settings: rules\.adaptive was true"):
        run(bart, inputs, tmp_path / "out.txt", resume=True, batching="static", **options)
    report = run(bart, inputs, tmp_path / "out.txt", resume=True, **options)
    assert report.resumed_samples == 12
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()


def test_what_the_engine_refuses_has_a_call_of_its_own(
    bart: Path, inputs: Path, tmp_path: Path, served: list[int]
) -> None:
    """The model has no positions for as many tokens as an output may have; outputs end before."""
    options = {"generation": {"max_new_tokens": 100, "eos_token_id": list(range(2, 200))}}
    run(bart, inputs, tmp_path / "static.txt", batching="static", **options)
    report = run(bart, inputs, tmp_path / "out.txt", **options)
    assert served and report.samples == RECORDS and report.skipped == 0
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "static.txt").read_bytes()
