"""The same command gives the same bytes: in a process in which nothing has run yet, killed at any moment or not."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastgen
from fastgen.decoding.captured import graph
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa
from fastgen.pipeline import generate_dataset
from fastgen.pipeline.encoding import ClassifyOptions, EmbedOptions, classify_dataset, embed_dataset
from fastgen.pipeline.encoding.loading import load_classifier, load_embedder
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import load
from tests.pipeline import tiny
from tests.pipeline.children import finished, in_child

# Large enough for the products of linear layers that FastGen chooses between.
WIDE: dict[str, dict[str, Any]] = {
    "bart": dict(d_model=384, encoder_ffn_dim=1024, decoder_ffn_dim=1024),
    "gpt2": dict(n_embd=384),
    "bert": dict(hidden_size=384, intermediate_size=1024, num_attention_heads=6, labels=3),
}
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 12}


class Run(NamedTuple):
    """A run over a data set, and how often it is killed."""

    model: str
    function: Callable[..., Any]
    load: Callable[[Any], Any]
    kind: Any
    form: str
    options: dict[str, Any]
    records: int
    kills: int


SAMPLED = {"do_sample": True, "max_new_tokens": 12}
GENERATES = (generate_dataset, load, RunOptions, "jsonl")
EMBEDS = (embed_dataset, load_embedder, EmbedOptions)
RUNS = {
    "beams": Run("bart", *GENERATES, {"generation": BEAMS, "workers": 0, "token_ids": True}, 80, 2),
    "samples": Run("gpt2", *GENERATES, {"generation": SAMPLED, "workers": 0, "token_ids": True}, 80, 2),
    "slots": Run("gpt2", *GENERATES, {"generation": BEAMS, "workers": 0, "batching": "continuous"}, 80, 2),
    "means": Run("bert", *EMBEDS, "npy", {"normalize": True, "pooling": "mean"}, 160, 2),
    "last tokens": Run("bert", *EMBEDS, "parquet", {"pooling": "lasttoken"}, 160, 2),
    "labels": Run("bert", classify_dataset, load_classifier, ClassifyOptions, "csv", {"top_k": 2}, 160, 2),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_any_moment_it_ends_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # the threads of a parent are not those of its child
    run = RUNS[name]
    folder = getattr(tiny, run.model)(tmp_path / "model", **WIDE[run.model])
    loaded = run.load(run.kind(model=str(folder), input="-", output="-", device="cpu", quiet=True))
    source = tmp_path / "in.txt"
    lines = tiny.sentences(run.records, longest=14 if run.function is generate_dataset else 40)
    lines[20], lines[21], lines[70] = "", "A" * 500, " "
    source.write_text("\n".join(lines) + "\n")

    def begin(output: Path) -> int:
        return in_child(lambda: _run(run, loaded, source, output))

    whole, output = (tmp_path / f"{what}.{run.form}" for what in ("whole", "out"))
    start = time.monotonic()
    assert finished(begin(whole)) == 0
    seconds = time.monotonic() - start
    journal = output.with_name(output.name + ".partial")
    moments, killed = random.Random(name), 0
    for _ in range(20 * run.kills):
        if killed == run.kills:
            break
        before = journal.stat().st_size if journal.exists() else 0
        child = begin(output)
        # A part of a whole run each, so that there is something left for the last of them.
        timer = threading.Timer(moments.uniform(0.3, 2.2) * seconds / run.kills, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = finished(child)
        timer.cancel()
        timer.join()
        if status == 0 or (output.exists() and not journal.exists()):  # it was faster than the signal: once more
            assert output.read_bytes() == whole.read_bytes()
            output.unlink()
            Path(f"{output}.errors.jsonl").unlink()
        else:
            assert status == -signal.SIGKILL
            killed += 1
            assert not output.exists() or output.read_bytes() == whole.read_bytes()
            assert not journal.exists() or journal.stat().st_size >= min(before, 1)
    assert killed == run.kills
    assert finished(begin(output)) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert Path(f"{output}.errors.jsonl").read_bytes() == Path(f"{whole}.errors.jsonl").read_bytes()
    names = {"model", "in.txt", whole.name, output.name, f"{whole.name}.errors.jsonl", f"{output.name}.errors.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


def _run(run: Run, loaded: Any, source: Path, output: Path) -> None:
    used, is_new = [], not output.with_name(output.name + ".partial").exists()
    chosen = choose.kernel_for
    choose.kernel_for = lambda *given: used.append(1) or chosen(*given)
    given = {"tokenizer": loaded.tokenizer, "resume": True, "quiet": True, "batch_size": 4, **run.options}
    run.function(loaded.model, source, output, **given)
    if is_new and run.function is generate_dataset and "batching" not in run.options:
        assert used or choose.instruction_set() is Isa.PORTABLE, "no product of FastGen's: the weights are too small"
        captured = fastgen.stats().get("transformers.captured_step", {}).get("accelerated", 0)
        assert captured or graph.unavailable(torch.device("cpu")), "no captured step: too few batches"
