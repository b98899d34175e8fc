"""Continuous batching: the files are those of static batches, whatever happens on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.optimizer.transformers.captured.slots import Slots
from fastgen.pipeline import SetupError, batches, generate_dataset
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.stages import Progress
from tests.pipeline import tiny
from tests.pipeline.generation.slots import assert_same, interrupt_after

pytestmark = pytest.mark.usefixtures("programs")

RECORDS = 24
# Many tokens that end an output, so that lengths differ much.
UNEVEN = {"max_new_tokens": 16, "eos_token_id": list(range(2, 40))}
BEAMS = {"num_beams": 3, "num_return_sequences": 2, **UNEVEN}
SAMPLED = {"do_sample": True, **UNEVEN}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight records, in windows of 16."""
    monkeypatch.setattr(batches, "RECORDS_OF_A_ROW", 2)
    monkeypatch.setattr(batches, "WINDOW_BATCHES", 4)


def run(model: Any, source: Path, output: Any, **options: Any) -> Any:
    defaults = {"generation": BEAMS, "batch_size": 4, "device": "cpu", "quiet": True, "workers": 0}
    return generate_dataset(model, source, output, **{**defaults, "batching": "continuous", **options})


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("\n".join(tiny.sentences(RECORDS)) + "\n")
    return tmp_path / "in.txt"


@pytest.mark.parametrize(
    ("kind", "generation", "form"),
    [
        ("bart", BEAMS, "jsonl"), ("bart", UNEVEN, "txt"), ("gpt2", UNEVEN, "jsonl"),
        ("gpt2", {**BEAMS, "repetition_penalty": 1.3}, "txt"),
    ],
)  # fmt: skip
def test_the_same_file_as_static_batches(
    kind: str, generation: dict[str, Any], form: str, inputs: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, options = request.getfixturevalue(kind), {"generation": generation, "token_ids": form == "jsonl"}
    static, new = tmp_path / f"static.{form}", tmp_path / f"new.{form}"
    of_static = run(model, inputs, static, batching="static", **options)
    of_new = run(model, inputs, new, **options)
    assert (of_static.batching, of_new.batching) == ("static", "continuous")
    assert of_static.tokens == of_new.tokens and of_new.batches == 3
    assert_same(new, static)
    if form == "jsonl":
        rows = [json.loads(line) for line in new.read_text().splitlines()]
        assert len({tuple(row["output_tokens"]) for row in rows}) > 5


def test_an_interrupted_run_ends_in_the_same_file(bart: Path, inputs: Path, tmp_path: Path) -> None:
    whole, output = tmp_path / "whole.txt", tmp_path / "out.txt"
    run(bart, inputs, whole, generation=SAMPLED)
    for most in (0, 4, 6):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(patch, most)
            run(bart, inputs, output, generation=SAMPLED, resume=True)
    with pytest.raises(SetupError, match=r"other settings: rules\.continuous was true"):
        run(bart, inputs, output, generation=SAMPLED, resume=True, batching="static")
    report = run(bart, inputs, output, generation=SAMPLED, resume=True)
    assert report.resumed_samples in (8, 16) and output.read_bytes() == whole.read_bytes()


def test_a_sample_does_not_depend_on_the_batch(gpt2: Path, inputs: Path, tmp_path: Path) -> None:
    for name, options in (("a", {}), ("b", {"batch_size": 3}), ("c", {"seed": 1})):
        run(gpt2, inputs, tmp_path / name, generation=SAMPLED, **options)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_records_that_fail(bart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the model refuses and those that are too long: the others are as they are without them."""
    loaded = load(RunOptions(model=str(bart), input="-", output="-", device="cpu", quiet=True))
    texts = tiny.sentences(RECORDS)
    (tmp_path / "good.txt").write_text("\n".join(texts) + "\n")
    run(loaded.model, tmp_path / "good.txt", tmp_path / "good.out", tokenizer=loaded.tokenizer)
    bad = {3: "light Z", 17: "", 20: "A" * 100, 23: "Z"}
    (tmp_path / "in.txt").write_text("\n".join(bad.get(n, text) for n, text in enumerate(texts)) + "\n")
    refused, generate = loaded.tokenizer.convert_tokens_to_ids("Z"), loaded.model.generate

    def refuses(**options: Any) -> Any:
        if any((value == refused).any() for name, value in options.items() if name in ("inputs", "input_ids")):
            raise LookupError("a token the model refuses")
        return generate(**options)

    monkeypatch.setattr(loaded.model, "generate", refuses)
    report = run(loaded.model, tmp_path / "in.txt", tmp_path / "out.txt", tokenizer=loaded.tokenizer)
    errors = [json.loads(line) for line in (tmp_path / "out.txt.errors.jsonl").read_text().splitlines()]
    assert [(each["position"], each["error"]) for each in errors] == [
        (3, "model-error"), (17, "empty"), (20, "too-long"), (23, "model-error")
    ]  # fmt: skip
    good = (tmp_path / "good.out").read_text().splitlines()
    expected = ["" if number in bad else line for number, line in enumerate(good)]
    assert (tmp_path / "out.txt").read_text().splitlines() == expected and report.skipped == 4


@pytest.mark.parametrize(
    ("error", "generation"), [(RuntimeError("can't allocate memory"), UNEVEN), (LookupError("a token"), SAMPLED)]
)
def test_a_step_that_fails_for_one_of_its_records(
    error: Exception, generation: dict[str, Any], gpt2: Path, inputs: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Scores are followed by a criterion, which must not see a step twice: no record that was in it goes on."""
    expected, output = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    run(gpt2, inputs, expected, generation=generation)
    rows = {line: json.loads(line) for line in expected.read_text().splitlines(keepends=True)}
    bad = next(row for row in rows.values() if row["output_tokens"][0] > 8)
    expected.write_text("".join(line for line, row in rows.items() if row is not bad))
    tokens, advance = tiny.tokenizer(encoder_decoder=False)(bad["input"])["input_ids"], Slots.advance

    def fails(step: Slots, *given: Any) -> list[Any]:
        if any(slot.owner.token_list == tokens and slot.entered + 3 < step._steps for slot in step.taken.values()):
            raise error
        return advance(step, *given)

    monkeypatch.setattr(Slots, "advance", fails)
    report = run(gpt2, inputs, output, generation=generation)
    errors = [json.loads(line) for line in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    kind = "out-of-memory" if isinstance(error, RuntimeError) else "model-error"
    assert [each["position"] for each in errors if each["error"] == kind] == [bad["id"]]
    assert bool(report.out_of_memory) is (kind == "out-of-memory")
    assert_same(output, expected)


def test_a_step_that_memory_runs_out_for_has_fewer_records(
    gpt2: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, output, advance, said = tmp_path / "expected.jsonl", tmp_path / "out.jsonl", Slots.advance, list[int]()
    run(gpt2, inputs, expected, generation=UNEVEN)

    def fails(step: Slots, *given: Any) -> list[Any]:
        if len(step.taken) > 2:
            raise RuntimeError("can't allocate memory")
        return advance(step, *given)

    monkeypatch.setattr(Slots, "advance", fails)
    monkeypatch.setattr(Progress, "add", lambda self, count=1, rate="": said.append(count))
    report = run(gpt2, inputs, output, generation=UNEVEN)
    assert_same(output, expected)
    assert report.out_of_memory and sum(said) == RECORDS


def test_what_the_engine_refuses_ends_the_run(bart: Path, inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="failed on every record: .*the model has 64 positions"):
        run(bart, inputs, tmp_path / "out.txt", generation={"max_new_tokens": 100})
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_progress_tells_of_slots(bart: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(Progress, "add", lambda self, count=1, rate="": said.append((count, rate)))
    run(bart, inputs, tmp_path / "out.txt", generation={"num_beams": 2, "max_new_tokens": 5})
    assert sum(count for count, _ in said) == RECORDS and len(said) >= 6
    states = [rate.split(", ", 1)[1] for _, rate in said if "slots" in rate]
    assert states and all(" tokens/s" in rate for _, rate in said)
    assert all(" of 8 slots busy, " in state for state in states)
    assert any(state.endswith(", 0 waiting") for state in states)
    assert any(state.endswith(", 4 waiting") for state in states)
