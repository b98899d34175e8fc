"""The benchmark of encoders, on models of one layer."""

from __future__ import annotations

import sys

import pytest
import torch

import fastgen
from benchmarks import encoder_sides, encoders
from benchmarks.backends import elsewhere
from fastgen.ops import quantized_linear

_HERE = ["--sides", "Transformers", "FastGen", "--repetitions", "1", "--layers", "1"]


@pytest.fixture(autouse=True)
def exact_afterwards():
    yield
    fastgen.enable(padding="exact")


def test_rows_are_measured_and_agree(capsys):
    assert encoders.main([*_HERE, "--texts", "6", "--only", "minilm", "latency-10", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["minilm", "latency-10", "int8"]


def test_the_row_of_int8_says_why_there_is_none(capsys, monkeypatch):
    monkeypatch.setattr(quantized_linear, "unavailable", lambda precision, *arguments: f"no {precision} here")
    assert encoders.main([*_HERE, "--texts", "3", "--only", "int8"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["| int8 of FastGen | not measured: no int8 here | | |"]


def test_nan_is_another_result(monkeypatch):
    """Also in a later batch than the first."""
    run = encoder_sides.run

    def with_nan(model, some, side):
        *before, last = run(model, some, side)
        return [*before, last * float("nan") if side == "FastGen" else last]

    monkeypatch.setattr(encoder_sides, "run", with_nan)
    assert encoders.main([*_HERE, "--texts", "40", "--only", "minilm"]) == 1


@pytest.fixture
def other_library(tmp_path, monkeypatch):
    """An environment that is this one, with a script that runs the model as it is."""
    python = tmp_path / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(elsewhere, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # the script has as many as this process

    script = tmp_path / "script.py"
    script.write_text(_OTHER.format(path=sys.path))
    monkeypatch.setattr(encoder_sides.There, "script", script)


_OTHER = """
import sys
sys.path = {path}
import torch, transformers

def load(asked):
    assert asked["library"] == "openvino" and asked["threads"] == torch.get_num_threads()
    model, states = transformers.AutoModel.from_pretrained(asked["folder"]).eval(), []

    def work(target):
        print("no answer")
        if target is not None:
            return torch.save(states, target)
        with torch.no_grad():
            states[:] = [
                model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
                for ids, mask in torch.load(asked["batches"])
            ]

    return "7", work
"""


def test_another_library_takes_part_in_a_process_of_its_own(other_library, capsys):
    assert encoders.main([*_HERE[3:], "--texts", "3", "--only", "minilm"]) == 0
    said = capsys.readouterr()
    assert "x OpenVINO (" in said.out and "ONNX Runtime" not in said.out
    assert "make bench-onnxruntime" in said.err


@pytest.mark.parametrize("added", [0.1, float("nan")])
def test_other_results_of_another_library_are_an_error(monkeypatch, added):
    class Side:
        def __init__(self, name, *given):
            self.added = added if name == "OpenVINO" else 0.0

        def run(self):
            pass

        close = run

        def states(self):
            return [torch.ones(3) + self.added if self.added else torch.ones(3)]

    monkeypatch.setattr(encoder_sides, "make", Side)
    with pytest.raises(RuntimeError, match="results of OpenVINO differ"):
        encoders.compared(None, [], ["Transformers", "OpenVINO", "FastGen"], 1)
