"""The benchmark of encoders, on models of one layer."""

from __future__ import annotations

import pytest

import fastgen
from benchmarks import encoders


@pytest.fixture(autouse=True)
def exact_afterwards():
    yield
    fastgen.enable(padding="exact")


def test_rows_are_measured_and_agree(capsys):
    arguments = ["--layers", "1", "--texts", "6", "--repetitions", "1", "--only", "minilm", "albert-base", "int8"]
    assert encoders.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[1] for line in lines] == ["minilm", "albert-base", "int8"]


def test_other_results_are_noticed(monkeypatch):
    run = encoders.run
    monkeypatch.setattr(
        encoders, "run", lambda model, some, side: [x + (side == "fastgen") for x in run(model, some, side)]
    )
    assert encoders.main(["--layers", "1", "--texts", "2", "--repetitions", "1", "--only", "minilm"]) == 1


def test_lengths():
    assert min(encoders.mixture(2000)) >= 3 and max(encoders.mixture(2000)) == 400
    assert {*encoders.uniform(2000)} == {*range(2, 101)}
    (batch,) = encoders.batches([3, 5], 2)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert not batch["input_ids"][0, 3:].any()
