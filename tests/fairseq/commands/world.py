"""What the tests of the commands share: a small world of data and models, and what both commands print."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fairseq.search import BeamSearch
from fairseq_cli import generate as original_generate
from fairseq_cli import interactive as original_interactive

import fastgen
from fastgen.fairseq import main as commands_of_fairseq
from fastgen.pipeline import fairseq as pipeline
from fastgen_cli import fairseq as commands

ROOT = Path(__file__).parents[3]
TEXT = ROOT / "examples" / "data"
LINES = re.compile(r"^([A-Z]-\d+(_\d+)?\t|Generate )")
NUMBERED = re.compile(r"^([HD]-\d+)\t(\S+)\t(.*)$")

# Of fairseq-fixed, which drops a last batch whose size is no multiple of 8, but for what BASE says.
FIXED = "candidate_multiple" in inspect.signature(BeamSearch.step).parameters

BASE = "--beam 3 --batch-size 8 --max-len-a 1.2 --max-len-b 4 --num-workers 0 --cpu".split()
BASE += "--required-batch-size-multiple 1".split()

TINY = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--decoder-ffn-embed-dim 64 --optimizer adam --lr 0.02 --max-tokens 1000 --cpu --no-epoch-checkpoints "
    "--disable-validation --num-workers 0"
).split()


def command_of_fairseq(*words: object) -> None:
    """What `python -m fastgen.fairseq` does, in this process."""
    assert commands_of_fairseq([str(word) for word in words]) == 0


def run(
    module: str, *words: object, program: str | Path = sys.executable, status: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`python -m module words`, which must end with the status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FASTGEN_CACHE": ""}
    command = [str(program), "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == status, done.stderr[-3000:]
    assert "tensorboardX" not in done.stdout + done.stderr  # a package that nobody needs is not asked for
    return done


def lines(text: str) -> list[str]:
    """The lines about sentences and scores, sorted; what took how long is left out."""
    return sorted(line for line in text.splitlines() if LINES.match(line) and not line.startswith("W-"))


class World:
    """What a newcomer has after the first steps: text, data and a trained model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data-bin"
        self.model = folder / "model" / "checkpoint_last.pt"

    def make(self) -> None:
        pairs = [(TEXT / f"heldout.{side}.txt").read_text().splitlines() for side in ("src", "ref")]
        for side, texts in zip(("de", "en"), pairs, strict=True):
            # Long words in parts, as byte pairs come.
            words = [re.sub(r"(\w{4})(?=\w)", r"\1@@ ", text) for text in texts]
            words = [" ".join(text.split()[: 4 + number % 9]) for number, text in enumerate(words)]
            for part, chosen in (("train", words[:400]), ("valid", words[400:410]), ("test", words[410:440])):
                (self.folder / f"{part}.{side}").write_text("\n".join(chosen) + "\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv)
            command_of_fairseq(
                "preprocess", "--source-lang", "de", "--target-lang", "en", "--destdir", self.data, "--trainpref",
                self.folder / "train", "--validpref", self.folder / "valid", "--testpref", self.folder / "test",
                "--joined-dictionary", "--thresholdsrc", 2, "--thresholdtgt", 2,
            )  # fmt: skip
            command_of_fairseq(
                "train", self.data, "--save-dir", self.model.parent, "--max-epoch", 12, "--share-all-embeddings",
                "--arch", "transformer_iwslt_de_en", *TINY,
            )  # fmt: skip


def configuration(kind: str, *words: object) -> Any:
    return commands._parse("test", [str(word) for word in words], kind)[1]


def printed(function: Callable[[], object]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        function()
    return output.getvalue()


def both(world: World, *options: object, model: Path | None = None, workers: int = 0) -> tuple[list[str], list[str]]:
    """The lines of `fairseq-generate` and of FastGen's command, both with FairSeq's own generation."""
    words = [world.data, "--path", model or world.model, *BASE, *options]
    with fastgen.disabled():
        cfg = configuration("generation", *words)
        own = copy.deepcopy(cfg)
        original = printed(lambda: original_generate.main(cfg))
        ours = printed(lambda: pipeline.generate(own, workers))
    return lines(original), lines(ours)


def both_interactive(world: World, source: Path, *options: object) -> tuple[list[str], list[str]]:
    """What is printed, in order: the answers to a buffer come in the order of its lines."""
    words = [world.data, "--path", world.model, "--input", source, "--max-len-b", 5, "--cpu", "--beam", 3, *options]

    def lines_of(run: Callable[[Any], object]) -> list[str]:
        given = copy.deepcopy(cfg)
        return [line for line in printed(lambda: run(given)).splitlines() if re.match(r"[A-VX-Z]-\d", line)]

    with fastgen.disabled():
        cfg = configuration("interactive_generation", *words)
        return lines_of(original_interactive.main), lines_of(lambda cfg: pipeline.interact(cfg, 1))


def train_language_model(data: Path, folder: Path) -> None:
    """Trains one for four steps."""
    command_of_fairseq(
        "train", data, "--task", "language_modeling", "--arch", "transformer_lm", "--save-dir", folder,
        "--decoder-layers", 1, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64,
        "--decoder-attention-heads", 2, "--tokens-per-sample", 32, "--max-tokens", 512, "--optimizer", "adam",
        "--lr", 0.01, "--max-update", 4, "--cpu", "--disable-validation", "--num-workers", 0,
    )  # fmt: skip


def one_line(capsys: pytest.CaptureFixture[str], program: str) -> str:
    """The error, which is one line, whatever FairSeq and torch have to say besides."""
    text = capsys.readouterr().err
    found = [line for line in text.splitlines() if line.startswith(f"{program}: ")]
    assert len(found) == 1, text
    assert "Traceback" not in text
    assert len(found[0]) < 700
    return found[0]
