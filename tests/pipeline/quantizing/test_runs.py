"""A run of `fastgen-quantize` that is interrupted, killed, resumed, or finds something in its way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastgen.pipeline.errors import PipelineError, SetupError
from fastgen.pipeline.quantizing import run as running
from fastgen.quantization import calibration, writing
from fastgen.quantization.checkpoint import dequantized
from fastgen.quantization.writing import load_block
from tests.pipeline.children import ended_at, files_of_at_most
from tests.pipeline.quantizing.runs import Killed, Stop, run

pytestmark = pytest.mark.sampled(5)


@pytest.mark.parametrize(
    ("blocks", "changes"), [(0, {}), (1, {}), (2, {}), (1, {"bits_per_weight": 7})], ids=["0", "1", "2", "mixed"]
)
def test_an_interrupted_run_ends_in_the_same_weights(llama, text, tmp_path, monkeypatch, blocks, changes):
    run(llama, tmp_path / "whole", text, **changes)
    real, done = calibration.quantise_block, []

    def stop_after(*args):
        if len(done) == blocks:
            raise KeyboardInterrupt
        done.append(args[0].name)
        return real(*args)

    monkeypatch.setattr(calibration, "quantise_block", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path / "out", text, **changes)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "out.partial").glob("block-*.safetensors"))) == blocks
    monkeypatch.setattr(calibration, "quantise_block", lambda *args: done.append(args[0].name) or real(*args))
    # Which layers get 8 bits is known, also where the model is measured on another text.
    evaluated = {"evaluate": str(text)} if changes else {}
    monkeypatch.setattr(calibration, "choices_of", lambda *_: pytest.fail("measured again"))
    run(llama, tmp_path / "out", text, resume=True, **changes, **evaluated)
    assert done == [f"model.layers.{number}" for number in range(3)]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out.partial").exists()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("out", "whole")]
    assert reports[0]["layers"] == reports[1]["layers"]
    assert {layer["bits"] for layer in reports[0]["layers"]} == ({4, 8} if changes else {4})


def test_what_a_run_may_be_resumed_with(llama, text, tmp_path):
    with ended_at(running, "_quantise", KeyboardInterrupt):
        run(llama, tmp_path / "out", text)
    with pytest.raises(SetupError, match="is left from an interrupted run"):
        run(llama, tmp_path / "out", text)
    for changes, message in (({"group_size": 32}, "group_size was 16 and is now 32"), ({"bits": 8}, "bits was 4")):
        with pytest.raises(SetupError, match=message):
            run(llama, tmp_path / "out", text, resume=True, **changes)
    other = tmp_path / "other.txt"
    other.write_text("in the beginning\n")
    with pytest.raises(SetupError, match=r"cannot resume with other settings: text"):
        run(llama, tmp_path / "out", other, resume=True)
    assert run(llama, tmp_path / "out", text, resume=True, evaluate=str(other)).measure == "perplexity"
    # It is complete: nothing is done again, and other settings are told.
    assert run(llama, tmp_path / "out", text, resume=True) is None
    with pytest.raises(SetupError, match="is not of this model, text and options"):
        run(llama, tmp_path / "out", text, resume=True, bits=8)
    with pytest.raises(SetupError, match="exists already"):
        run(llama, tmp_path / "out", text)
    assert run(llama, tmp_path / "out", text, overwrite=True, bits=8).bits == 8
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out"]


def test_a_run_that_ended_between_its_last_two_steps(llama, text, tmp_path):
    from fastgen.pipeline.quantizing.settings import Work

    with ended_at(Work, "_drop", Stop):
        run(llama, tmp_path / "out", text)
    assert (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    assert run(llama, tmp_path / "out", text, resume=True) is None
    assert not (tmp_path / "out.partial").exists()


def test_what_fastgen_did_not_write_is_not_replaced(llama, text, tmp_path):
    for name in ("out", "other.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    for out in ("out", "other"):
        with pytest.raises(SetupError, match="was not written by fastgen-quantize"):
            run(llama, tmp_path / out, text, overwrite=True)
    assert (tmp_path / "out" / "mine").exists() and (tmp_path / "other.partial" / "mine").exists()


def test_two_runs_do_not_write_one_output(llama, text, tmp_path, monkeypatch):
    def second(*_):
        with pytest.raises(SetupError, match="another run is writing"):
            run(llama, tmp_path / "out", text, resume=True)
        raise Stop

    monkeypatch.setattr(running, "_quantise", second)
    with pytest.raises(Stop):
        run(llama, tmp_path / "out", text)


def test_a_full_disk(llama, text, tmp_path):
    for size in (10_000, 20_000):  # of a block, and of the model
        with files_of_at_most(size), pytest.raises(PipelineError, match=r"cannot write .*(block|model).*--resume"):
            run(llama, tmp_path / "out", text, resume=(tmp_path / "out.partial").exists())
        assert not (tmp_path / "out").exists()
    run(llama, tmp_path / "out", text, resume=True)
    run(llama, tmp_path / "whole", text)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_kill_while_a_block_is_written(llama, text, tmp_path):
    def half(path, layers):
        path.write_bytes(b"half")
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(writing, "save_block", half)
        run(llama, tmp_path / "out", text)
    run(llama, tmp_path / "out", text, resume=True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_a_damaged_block_is_told(llama, text, tmp_path):
    with ended_at(running, "save", Stop):
        run(llama, tmp_path / "out", text)
    block = tmp_path / "out.partial" / "block-0001.safetensors"
    assert all(dequantized(layer.weight, torch.float32).isfinite().all() for layer in load_block(block).values())
    os.truncate(block, 100)
    with pytest.raises(SetupError, match=r"block-0001.safetensors is damaged"):
        run(llama, tmp_path / "out", text, resume=True)


@pytest.mark.parametrize("again", ["resume", "overwrite"])
@pytest.mark.parametrize("killed_at", [1, 2, 4, 7])
def test_a_kill_while_the_directory_is_removed(killed_at, again, llama, text, tmp_path, monkeypatch):
    """Whatever is left says whose it is: the next run takes it over, or drops it."""
    with ended_at(running, "_write", Stop):
        run(llama, tmp_path / "out", text)
    removed = itertools.count(1)

    def until(remove):
        def removing(path, *args, **kwargs):
            if next(removed) == killed_at:
                raise Stop
            return remove(path, *args, **kwargs)

        return removing

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", until(os.unlink))
        patch.setattr(Path, "unlink", until(Path.unlink))
        patch.setattr(os, "rmdir", until(os.rmdir))
        with contextlib.suppress(Stop):
            run(llama, tmp_path / "out", text, overwrite=True)
    run(llama, tmp_path / "out", text, **{again: True})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]
