"""Commands over a file, with Moses detokenising, from end to end, each run in a process of its own.

* `fastgen-generate` with the examples' small trained model on its held-out sources, repeated as often as needed. Times
  are from its report: from the first record read until the output is in place, without loading the model.
* `fastgen-generate-for-fairseq` against FairSeq's own command. Moses splits the examples' text into words, FairSeq
  preprocesses it, and a small model is trained on it for at most a minute: its outputs end as a real model's do, and
  have words to be put together. A time is that of the process, from its start to its end.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT, processes
from benchmarks.measure import alternate
from benchmarks.record import Record
from benchmarks.workload import Context, Workload

_DATA = ROOT / "examples" / "data"
_MESSAGE = re.compile(
    r"in (?P<generate>\S+) s: .*\nthe model waited \S+ % of the time for input and (?P<output>\S+) % for "
    r"post-processing; finishing took (?P<finish>\S+) s"
)


class Run(NamedTuple):
    """The results of a command: the lines that must equal the other one's, and the parts of its time.

    It generated, and waited meanwhile to hand over outputs; then it finished. With queues as long as the input, a
    pipeline that cannot keep up would only show in finishing. `stats` are FastGen's counts, if the command reports
    them.
    """

    lines: Sequence[str]
    generate: float = 0.0
    waited: float = 0.0
    finish: float = 0.0
    stats: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Command(Workload):
    """A command without FastGen and with it. Attributes: the number of `outputs`, and the command's `options`."""

    outputs: int
    options: tuple[str, ...]

    group = "pipeline"

    @abstractmethod
    def prepare(self, context: Context, folder: Path) -> None:
        """Writes the inputs."""

    @abstractmethod
    def once(self, context: Context, folder: Path, is_fast: bool) -> tuple[float, Run]:
        """Runs the command; returns its seconds and results."""

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {"outputs": self.outputs, "options": [*self.options]}
        with tempfile.TemporaryDirectory() as name:
            context.log("preparing")
            self.prepare(context, Path(name))
            runs = {
                side: partial(self.once, context, Path(name), side == self.subject)
                for side in (self.baseline, self.subject)
            }
            found = record.take(alternate(runs, self.repetitions_in(context), context.log))
        expected = found[self.baseline][0].lines
        pairs = [zip(expected, run.lines, strict=True) for each in found.values() for run in each]
        differing = [sum(a != b for a, b in lines) for lines in pairs]
        record.identical = not any(differing)
        record.notes += [f"{count} of {len(expected)} lines differ" for count in differing if count]
        fast = found[self.subject]
        # The maximum over runs: the promise about waiting must hold in each.
        record.metrics["waiting_percent"] = max(100 * run.waited / run.generate for run in fast)
        held_up = [(run.waited + run.finish) / (run.generate + run.finish) for run in fast]
        record.metrics["held_up_percent"] = 100 * max(held_up)
        if all(run.stats is not None for run in fast):
            counts = [(run.stats or {}).get(self.entry_point, {}) for run in fast]
            record.accelerated = all(each.get("accelerated") and not each.get("fallback") for each in counts)
            for run in fast:
                record.count_fallbacks(run.stats or {})


def _whole(lines: Sequence[str], count: int) -> Sequence[str]:
    if len(lines) != count:
        raise RuntimeError(f"{len(lines)} lines instead of {count}")
    return lines


@dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """`fastgen-generate`. Attributes: the `model`, and the `inputs` to run it on."""

    options: tuple[str, ...] = ("--detokenizer", "moses", "--lang", "en", "--batch-size", "16")
    model: Path = ROOT / "examples" / "models" / "kjv-bart"
    inputs: Path = _DATA / "heldout.src.txt"

    def prepare(self, context: Context, folder: Path) -> None:
        lines = self.inputs.read_text(encoding="utf-8").splitlines()
        (folder / "input.txt").write_text("".join(f"{line}\n" for line in islice(cycle(lines), self.outputs)))

    def once(self, context: Context, folder: Path, is_fast: bool) -> tuple[float, Run]:
        source, output, report = (folder / name for name in ("input.txt", "output.txt", "report.json"))
        command = [sys.executable, "-m", "fastgen_cli.generate", str(self.model), str(source), str(output)]
        command += [*self.options, "--device", str(context.device), "--report", str(report), "--overwrite", "--quiet"]
        processes.run([*command, *([] if is_fast else ["--no-fastgen"])], context.threads)
        lines = _whole(output.read_text(encoding="utf-8").splitlines(), self.outputs)
        found = json.loads(report.read_text(encoding="utf-8"))
        seconds = [found["seconds"][name] for name in ("generate", "waiting_for_output", "finish")]
        return seconds[0] + seconds[2], Run(lines, *seconds, found["fastgen"].get("stats"))


@dataclass(frozen=True, kw_only=True)
class FairSeqGenerate(Command):
    """`fastgen-generate-for-fairseq`.

    Attributes:
        updates: of the model's training.
        width: of the model; its inner width is four times as large.
        layers: of the encoder, and of the decoder.
    """

    options: tuple[str, ...] = ("--beam", "5", "--batch-size", "32", "--max-len-a", "1.2", "--max-len-b", "10")
    updates: int = 40
    width: int = 256
    layers: int = 3

    baseline: str = "fairseq"
    subject: str = "fastgen-fairseq"

    def run(self, context: Context, record: Record) -> None:
        from fastgen.fairseq import missing

        problem = missing()
        if problem is not None:
            record.skipped[self.baseline] = problem
            return
        super().run(context, record)
        record.parameters |= {"layers": self.layers, "width": self.width, "updates": self.updates}

    def prepare(self, context: Context, folder: Path) -> None:
        """Prepares data with `outputs` sources, and a model. Repeated sources are generated each time."""
        from sacremoses import MosesTokenizer

        moses = MosesTokenizer("en")
        for part, language in (("src", "de"), ("ref", "en")):
            texts = (_DATA / f"heldout.{part}.txt").read_text(encoding="utf-8").splitlines()
            lines = [moses.tokenize(text, return_str=True) for text in texts]
            for name, chosen in (("train", lines), ("test", islice(cycle(lines), self.outputs))):
                path = folder / f"{name}.{language}"
                path.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
        self._python(
            context, "fastgen.fairseq", "preprocess", "--source-lang", "de", "--target-lang", "en",
            "--joined-dictionary", "--trainpref", str(folder / "train"), "--testpref", str(folder / "test"),
            "--destdir", str(folder / "data"),
        )  # fmt: skip
        sizes = {"layers": self.layers, "embed-dim": self.width, "ffn-embed-dim": 4 * self.width}
        self._python(
            context, "fastgen.fairseq", "train", str(folder / "data"), "--save-dir", str(folder / "model"),
            "--arch", "transformer", "--share-all-embeddings",
            *(f"--{part}-{name}={size}" for part in ("encoder", "decoder") for name, size in sizes.items()),
            "--optimizer", "adam", "--lr", "0.001", "--max-tokens", "1000", "--max-update", str(self.updates),
            "--no-epoch-checkpoints", "--no-save-optimizer-state", "--disable-validation", "--dropout", "0",
            "--valid-subset", "test", "--seed", "1",
        )  # fmt: skip

    def once(self, context: Context, folder: Path, is_fast: bool) -> tuple[float, Run]:
        words = [str(folder / "data"), "--path", str(folder / "model" / "checkpoint_last.pt"), *self.options]
        words += ["--source-lang", "de", "--target-lang", "en", "--tokenizer", "moses", "--scoring", "sacrebleu"]
        start = time.perf_counter()
        command = ["fastgen_cli.fairseq"] if is_fast else ["fastgen.fairseq", "--no-fastgen"]
        done = self._python(context, *command, "generate", *words)
        seconds = time.perf_counter() - start
        lines = _whole(_texts(done.stdout), 3 * self.outputs + 1)
        if not is_fast:
            return seconds, Run(lines)
        found = _MESSAGE.search(done.stderr)
        if found is None:
            raise RuntimeError("the command does not say how long the model waited")
        generate, output, finish = map(float, found.groups())
        return seconds, Run(lines, generate, generate * output / 100, finish)

    @staticmethod
    def _python(context: Context, *words: str) -> Any:
        on_cpu = ["--cpu"] if context.device.type == "cpu" and "preprocess" not in words else []
        return processes.run([sys.executable, "-m", *words, *on_cpu], context.threads)


def _texts(output: str) -> list[str]:
    """Returns sources, references, detokenised outputs without their score, and the line of the scores."""
    lines = [line for line in output.splitlines() if re.match(r"[STD]-\d+\t|Generate ", line)]
    return sorted(re.sub(r"^(D-\d+)\t\S+", r"\1", line) for line in lines)


WORKLOADS = [
    Generate(
        name="pipeline-100",
        title="fastgen-generate, 100 outputs, Moses",
        outputs=100,
        quick=True,
        quick_repetitions=1,
    ),
    Generate(name="pipeline-2000", title="fastgen-generate, 2,000 outputs, Moses", outputs=2000, repetitions=1),
    FairSeqGenerate(
        name="fairseq-generate-300",
        title="fastgen-generate-for-fairseq, 300 outputs, Moses",
        outputs=300,
        repetitions=2,
    ),
]
