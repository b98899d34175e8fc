"""The same command gives the same bytes: with an empty cache folder or a full one, killed at any moment or not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import fastgen
from fastgen.decoding.captured import graph
from fastgen.ops import gpu as operators
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa
from fastgen.pipeline import generate_dataset
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import load
from tests.pipeline import tiny
from tests.pipeline.children import finished, in_child

# Batches of four, and enough of them for a captured step.
RECORDS = 100
# Large enough for the products of linear layers that FastGen chooses between.
WIDE = {
    "bart": dict(d_model=384, encoder_ffn_dim=1024, decoder_ffn_dim=1024),
    "gpt2": dict(n_embd=384),
}
GENERATION = {
    "bart": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 12},
    "gpt2": {"do_sample": True, "max_new_tokens": 12},
}


def run_in_child(loaded, source: Path, output: Path, generation: dict, cache: Path) -> int:
    """Begins or resumes the run in a process of its own, in which nothing has been measured yet; returns its id."""
    used = []
    new = not output.with_name(output.name + ".partial").exists()

    def run() -> None:
        chosen = choose.kernel_for
        choose.kernel_for = lambda *given: used.append(1) or chosen(*given)
        os.environ["FASTGEN_CACHE"] = str(cache)
        options = {"generation": generation, "batch_size": 4, "quiet": True, "workers": 0, "token_ids": True}
        generate_dataset(loaded.model, source, output, tokenizer=loaded.tokenizer, resume=True, **options)
        has_kernels = choose.instruction_set() is not Isa.PORTABLE
        assert used or not new or not has_kernels, "no product of FastGen's: the weights are too small"
        captured = fastgen.stats().get("transformers.captured_step", {}).get("accelerated", 0)
        assert captured or not new or graph.unavailable(torch.device("cpu")), "no captured step: too few batches"

    return in_child(run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("kind", "most"), [("bart", 3), ("gpt2", 2), pytest.param("bart", 8, marks=pytest.mark.long)])
def test_killed_at_any_moment_it_ends_in_the_same_bytes(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    torch.set_num_threads(1)  # the threads of a parent are not those of its child
    folder = getattr(tiny, kind)(tmp_path / "model", **WIDE[kind])
    loaded = load(RunOptions(model=str(folder), input="-", output="-", device="cpu", quiet=True))
    source = tmp_path / "in.txt"
    source.write_text("\n".join(tiny.sentences(RECORDS)) + "\n")

    def whole(name: str, cache: Path) -> tuple[bytes, float]:
        start = time.monotonic()
        assert finished(run_in_child(loaded, source, tmp_path / name, GENERATION[kind], cache)) == 0
        return (tmp_path / name).read_bytes(), time.monotonic() - start

    warm = tmp_path / "warm"
    expected, seconds = whole("cold.jsonl", warm)
    assert whole("warm.jsonl", warm)[0] == expected
    rows = [json.loads(line) for line in expected.splitlines()]
    assert len(rows) == RECORDS and all(isinstance(score, float) for row in rows for score in row["scores"])

    moments, kills, ends = random.Random(0), 0, 0
    while kills < most:
        output = tmp_path / f"killed-{ends}.jsonl"
        cold = Path(tmp_path / f"cache-{kills}")
        child = run_in_child(loaded, source, output, GENERATION[kind], moments.choice([cold, warm]))
        timer = threading.Timer(moments.uniform(0, seconds / 3), os.kill, (child, signal.SIGKILL))
        timer.start()
        status = finished(child)
        timer.cancel()
        timer.join()
        shutil.rmtree(cold, ignore_errors=True)
        if status == 0:
            assert output.read_bytes() == expected
            ends += 1
        else:
            assert status == -signal.SIGKILL
            kills += 1
    assert finished(run_in_child(loaded, source, tmp_path / f"killed-{ends}.jsonl", GENERATION[kind], warm)) == 0
    assert (tmp_path / f"killed-{ends}.jsonl").read_bytes() == expected
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".unfinished")]
