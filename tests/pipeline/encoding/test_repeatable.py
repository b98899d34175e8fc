"""Killed at any moment and resumed, a run ends in the bytes of one that was not."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from fastgen.pipeline.encoding import ClassifyOptions, EmbedOptions, classify_dataset, embed_dataset
from fastgen.pipeline.encoding.loading import load_classifier, load_embedder
from tests.pipeline import tiny
from tests.pipeline.children import finished, in_child

# Large enough for the products of linear layers that FastGen chooses between.
WIDE = dict(hidden_size=384, intermediate_size=1024, num_attention_heads=6)
RUNS = {
    "npy": (embed_dataset, load_embedder, EmbedOptions, {"normalize": True, "pooling": "mean"}, 8),
    "parquet": (embed_dataset, load_embedder, EmbedOptions, {"pooling": "weightedmean"}, 4),
    "csv": (classify_dataset, load_classifier, ClassifyOptions, {"top_k": 2}, 6),
}


@pytest.mark.sampled(3)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("form", RUNS)
def test_killed_at_any_moment_it_ends_in_the_same_bytes(form: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # the threads of a parent are not those of its child
    run, load, kind, options, kills = RUNS[form]
    folder = tiny.bert(tmp_path / "model", labels=3, **WIDE)
    loaded = load(kind(model=str(folder), input="-", output="-", device="cpu", quiet=True))
    source = tmp_path / "in.txt"
    lines = tiny.sentences(400, longest=40)
    lines[50], lines[51], lines[300] = "", "A" * 500, " "
    source.write_text("\n".join(lines) + "\n")

    def begin(output: Path) -> int:
        given = {"tokenizer": loaded.tokenizer, "resume": True, "quiet": True, "batch_size": 4, **options}
        return in_child(lambda: run(loaded.model, source, output, **given))

    whole = tmp_path / f"whole.{form}"
    start = time.monotonic()
    assert finished(begin(whole)) == 0
    seconds = time.monotonic() - start
    output = tmp_path / f"out.{form}"
    journal = output.with_name(output.name + ".partial")
    moments, killed = random.Random(form), 0
    for _ in range(20 * kills):
        if killed == kills:
            break
        before = journal.stat().st_size if journal.exists() else 0
        child = begin(output)
        # A part of a whole run each, so that there is something left for the last of them.
        timer = threading.Timer(moments.uniform(0.3, 2.2) * seconds / kills, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = finished(child)
        timer.cancel()
        timer.join()
        if status == 0:  # it was faster: once more
            assert output.read_bytes() == whole.read_bytes()
            output.unlink()
            Path(f"{output}.errors.jsonl").unlink()
        else:
            assert status == -signal.SIGKILL
            killed += 1
            assert not output.exists() or output.read_bytes() == whole.read_bytes()
            assert not journal.exists() or journal.stat().st_size >= min(before, 1)
    assert killed == kills
    assert finished(begin(output)) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert Path(f"{output}.errors.jsonl").read_bytes() == Path(f"{whole}.errors.jsonl").read_bytes()
    names = {"model", "in.txt", whole.name, output.name, f"{whole.name}.errors.jsonl", f"{output.name}.errors.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names
