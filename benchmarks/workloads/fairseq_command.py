"""`fairseq-generate` against `fastgen-generate-for-fairseq`: the whole command, with Moses detokenising.

The text is that of the examples, split into words by Moses, preprocessed by FairSeq's command, and a small model is
trained on it for a minute or less: its outputs end where a model's outputs end, and have words to be put together. Each
run is a command in a process of its own; its time is that of the process, from its start to its end. Backends:

* fairseq: `python -m fastgen.fairseq --no-fastgen generate`, which is FairSeq's own command;
* fastgen-fairseq: `fastgen-generate-for-fairseq`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import ROOT
from benchmarks.measure import alternate, summary
from benchmarks.memory import child_environment
from benchmarks.record import Record, Target
from benchmarks.workload import NEVER_SLOWER, Context, Workload

_ALONE, _FAST = "fairseq", "fastgen-fairseq"
_TIMES = re.compile(
    r"in (?P<generate>\S+) s: .*\nthe model waited (?P<input>\S+) % of the time for input and (?P<output>\S+) % for "
    r"post-processing; finishing took (?P<finish>\S+) s"
)


class _Run(NamedTuple):
    """What a command printed, and on standard error."""

    output: str
    messages: str


@dataclass(frozen=True, kw_only=True)
class FairSeqCommand(Workload):
    """The command, timed end to end.

    Attributes:
        outputs: how many to make.
        updates: of the model, before.
        width: of the model; its inner width is four times as much.
        layers: of the encoder, and of the decoder.
        options: of the command.
    """

    outputs: int
    updates: int = 40
    width: int = 256
    layers: int = 3
    options: tuple[str, ...] = ("--beam", "5", "--batch-size", "32", "--max-len-a", "1.2", "--max-len-b", "10")
    texts: Path = ROOT / "examples" / "data"

    group = "pipeline"
    entry_point = "fairseq.generate"

    def new_record(self) -> Record:
        record = super().new_record()
        record.baseline, record.subject = _ALONE, _FAST
        return record

    def run(self, context: Context, record: Record) -> None:
        from fastgen.fairseq import missing

        record.parameters = {
            "outputs": self.outputs,
            "layers": self.layers,
            "width": self.width,
            "updates": self.updates,
            "options": list(self.options),
        }
        problem = missing()
        if problem is not None:
            record.skipped[_ALONE] = problem
            return
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            context.log("preprocessing and training")
            self._prepare(context, folder)
            words = [str(folder / "data"), "--path", str(folder / "model" / "checkpoint_last.pt"), *self.options]
            words += ["--source-lang", "de", "--target-lang", "en", "--tokenizer", "moses", "--scoring", "sacrebleu"]
            words += ["--cpu"] if context.device.type == "cpu" else []

            def run_of(*command: str) -> Callable[[], tuple[float, _Run]]:
                return lambda: self._timed(context, [*command, *words])

            runs = {
                _ALONE: run_of("fastgen.fairseq", "--no-fastgen", "generate"),
                _FAST: run_of("fastgen_cli.fairseq", "generate"),
            }
            results = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in runs]) for name, runs in results.items()}
        record.compare()
        self._check(record, [run for _, run in results[_ALONE]], [run for _, run in results[_FAST]])

    def _prepare(self, context: Context, folder: Path) -> None:
        """Data of so many sources, and a model. A repeated source is generated as often as it is there."""
        from sacremoses import MosesTokenizer

        moses = MosesTokenizer("en")
        for backend, language in (("src", "de"), ("ref", "en")):
            texts = (self.texts / f"heldout.{backend}.txt").read_text(encoding="utf-8").splitlines()
            lines = [moses.tokenize(text, return_str=True) for text in texts]
            for part, chosen in (("train", lines), ("test", islice(cycle(lines), self.outputs))):
                path = folder / f"{part}.{language}"
                path.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
        languages = ("--source-lang", "de", "--target-lang", "en")
        self._command(
            context, "fastgen.fairseq", "preprocess", *languages, "--trainpref", str(folder / "train"), "--testpref",
            str(folder / "test"), "--destdir", str(folder / "data"), "--joined-dictionary",
        )  # fmt: skip
        size = [f"--{part}-{what}" for part in ("encoder", "decoder") for what in ("layers", "embed-dim")]
        sizes = [str(value) for _ in range(2) for value in (self.layers, self.width)]
        inner = [f"--{part}-ffn-embed-dim={4 * self.width}" for part in ("encoder", "decoder")]
        self._command(
            context, "fastgen.fairseq", "train", str(folder / "data"), "--save-dir", str(folder / "model"), "--arch",
            "transformer", "--share-all-embeddings", *(word for pair in zip(size, sizes, strict=True) for word in pair),
            *inner, "--optimizer", "adam", "--lr", "0.001", "--max-tokens", "1000", "--max-update", str(self.updates),
            "--no-epoch-checkpoints", "--no-save-optimizer-state", "--disable-validation", "--dropout", "0",
            "--valid-subset", "test", "--seed", "1", *(["--cpu"] if context.device.type == "cpu" else []),
        )  # fmt: skip

    def _timed(self, context: Context, words: list[str]) -> tuple[float, _Run]:
        start = time.perf_counter()
        done = self._command(context, *words)
        return time.perf_counter() - start, _Run(done.stdout, done.stderr)

    def _command(self, context: Context, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, env=child_environment(context.threads), cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words[:2])} ended with status {done.returncode}: {done.stderr[-500:]}")
        return done

    def _check(self, record: Record, alone: list[_Run], fast: list[_Run]) -> None:
        record.identical = True
        expected = _texts(alone[0])
        if len(expected) != 3 * self.outputs + 1:
            record.errors.append(f"{len(expected)} lines instead of {3 * self.outputs + 1}")
        for run in (*alone, *fast):
            differing = len(set(expected) ^ set(_texts(run)))
            if differing:
                record.identical = False
                record.notes.append(f"{differing} lines are in one output only")
        found = [_TIMES.search(run.messages) for run in fast]
        if None in found:
            record.errors.append("the command does not say how long the model waited")
            return
        times: list[Any] = [{name: float(text) for name, text in match.groupdict().items()} for match in found if match]
        # The largest of the runs: a promise about waiting has to hold in each.
        record.metrics["waiting_percent"] = max(each["output"] for each in times)
        record.metrics["held_up_percent"] = max(_held_up(each) for each in times)


def _held_up(times: dict[str, float]) -> float:
    """The part of the time in which post-processing, not the model, was what a run went on for, in %."""
    waited = times["generate"] * times["output"] / 100
    return 100 * (waited + times["finish"]) / (times["generate"] + times["finish"])


def _texts(run: _Run) -> list[str]:
    """Sources, references, detokenised outputs without their score, and the line of the scores."""
    lines = [line for line in run.output.splitlines() if re.match(r"[STD]-\d+\t|Generate ", line)]
    return sorted(re.sub(r"^(D-\d+)\t\S+", r"\1", line) for line in lines)


_WAITING = Target("% of the time that the model waited for post-processing", "waiting_percent", at_most=2)
WORKLOADS = [
    FairSeqCommand(
        name="fairseq-generate-64",
        title="fastgen-generate-for-fairseq, 64 outputs, Moses",
        outputs=64,
        updates=10,
        width=128,
        layers=2,
        quick=True,
        quick_repetitions=1,
        targets=(_WAITING, NEVER_SLOWER),
    ),
    FairSeqCommand(
        name="fairseq-generate-300",
        title="fastgen-generate-for-fairseq, 300 outputs, Moses",
        outputs=300,
        repetitions=2,
        targets=(_WAITING, NEVER_SLOWER),
    ),
]
