"""The common parts of the generating commands: loading, the stages, counting and printing."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TextIO

from fastgen.pipeline.errors import PipelineError, SetupError, writing
from fastgen.pipeline.fairseq.errors import explained, reason
from fastgen.pipeline.fairseq.files import load_models
from fastgen.pipeline.fairseq.formatting import Pair, Scorer, Sentence, Writer, Written, dictionaries, plain, unpadded
from fastgen.pipeline.postprocess import PostProcessor, default_workers
from fastgen.pipeline.run import Run, RunReport
from fastgen.pipeline.stages import Timing, run_stages

logger = logging.getLogger("fastgen.fairseq")

# Forking a process that uses the accelerated BLAS of macOS is not safe.
_CAN_FORK = sys.platform == "linux"
Keep = Callable[[list[Written]], None]


@dataclass(frozen=True)
class Batch:
    """One of FairSeq's batches, and the model's output for it."""

    sample: Any
    hypotheses: list[list[Any]]
    seconds: float


class FairseqRun(Run):
    """The common parts of both commands. A sample is a batch in FairSeq's form; None marks the end of a buffer.

    Args:
        output: where the lines go.
        workers: worker processes; 0 does their work in a thread.
        keep: also receives what has been printed, batch by batch.
    """

    interactive = False

    def __init__(self, cfg: Any, output: TextIO, workers: int | None, keep: Keep | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.sources = 0
        self.score: str | None = None
        self._output = output
        self._keep = keep
        self._workers = (default_workers() if workers is None else workers) if _CAN_FORK else 0
        self._pending: list[Future[str | None]] = []

    def check(self) -> None:
        generation = self.cfg.generation
        if self.cfg.common_eval.path is None:
            raise SetupError("--path is needed: the checkpoint to generate with")
        if generation.sampling and generation.nbest != generation.beam:
            raise SetupError("--sampling prints every sample: give --nbest the number that --beam has")

    def load(self) -> None:
        from fairseq_cli.generate import get_symbols_to_strip_from_output

        self._load_models()
        self._generates = self._generator()
        strip = get_symbols_to_strip_from_output(self._generates)
        self._scorer = None if self.interactive else Scorer(self.cfg, self._target)
        scores_text = self._scorer is not None and self._scorer.takes_text
        self._writer = Writer(self.task, self.cfg, strip, self.interactive, scores_text)

    def _load_models(self) -> None:
        """Loads task and models in the order of FairSeq's commands, which determines what a seed draws."""
        import numpy as np
        import torch
        from fairseq import tasks, utils

        cfg = self.cfg
        with explained("--user-dir"):
            utils.import_user_module(cfg.common)
        logger.debug(cfg)
        if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
            np.random.seed(cfg.common.seed)
            utils.set_torch_seed(cfg.common.seed)
        self.cuda = torch.cuda.is_available() and not cfg.common.cpu
        with explained(f"task {cfg.task._name} cannot be set up"):
            self.task = tasks.setup_task(cfg.task)
        self._source, self._target = dictionaries(self.task)
        with explained("--model-overrides"):
            self.overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        paths = utils.split_paths(cfg.common_eval.path)
        self.models, self.saved = load_models(paths, self.task, cfg, self.overrides)

    def begin(self) -> None:
        writer, scorer = self._writer, self._scorer
        writers = PostProcessor[list[Sentence], list[Written]](lambda: writer, self._workers, "fork")
        self._writers = self.closing.enter_context(contextlib.closing(writers))
        if scorer is not None:
            scorers = PostProcessor[list[Pair], str | None](lambda: scorer, min(self._workers, 1), "fork")
            self._scorers = self.closing.enter_context(contextlib.closing(scorers))

    def process(self) -> Timing:
        """Runs the stages. Prints everything that is finished, even what has waited for something else."""
        try:
            return run_stages(self.plan(), self.compute, self._post, self._record, read_ahead=False)
        finally:
            self.leave()

    def _ready(self, models: Iterable[Any]) -> None:
        for model in models:
            if self.cfg.common.fp16:
                model.half()
            if self.cuda and not self.cfg.distributed_training.pipeline_model_parallel:
                model.cuda()
            model.prepare_for_inference_(self.cfg)

    def _positions(self) -> Any:
        from fairseq import utils

        return utils.resolve_max_positions(self.task.max_positions(), *(model.max_positions() for model in self.models))

    def compute(self, sample: Any) -> Batch | None:
        """Returns the model's output for a sample. Raises a PipelineError with the reason for a failure."""
        from fairseq import utils

        if sample is None:
            return None
        moved = utils.move_to_cuda(sample) if self.cuda else sample
        constraints, size = moved.get("constraints"), self.cfg.generation.prefix_size
        if self.cfg.generation.constraints and constraints is None:
            raise SetupError(
                "--constraints: the data have none (fastgen-interactive-for-fairseq takes them with a text)"
            )
        prefix = moved["target"][:, :size] if size > 0 and not self.interactive else None
        start = time.perf_counter()
        try:
            hypotheses = self.task.inference_step(
                self._generates, self.models, moved, prefix_tokens=prefix, constraints=constraints
            )
        except Exception as error:
            unknown = self._unknown_token(moved)
            if unknown is not None:
                raise PipelineError(unknown) from error
            raise PipelineError(f"the model failed: {type(error).__name__}: {reason(error)}") from error
        return Batch(sample, hypotheses, time.perf_counter() - start)

    def _unknown_token(self, sample: Any) -> str | None:
        """Describes a token in the data that is not in the dictionary, on which the model of a damaged data set
        fails.
        """
        import torch

        named = (
            ("source", sample["net_input"].get("src_tokens"), self._source),
            ("target", sample.get("target"), self._target),
        )
        for name, tokens, dictionary in named:
            if not torch.is_tensor(tokens) or tokens.is_floating_point() or dictionary is None or not tokens.numel():
                continue
            wrong = [token for token in map(int, tokens.cpu().aminmax()) if not 0 <= token < len(dictionary)]
            if wrong:
                return (
                    f"the {name} data hold token {wrong[-1]}, but the dictionary has {len(dictionary)} entries: "
                    "they are damaged, or were made with another dictionary"
                )
        return None

    def _post(self, batch: Batch | None) -> tuple[Batch, Future[list[Written]]] | None:
        return None if batch is None else (batch, self._writers.submit(list(self._sentences(batch))))

    def _sentences(self, batch: Batch) -> Iterator[Sentence]:
        sample, pad = batch.sample, self._target.pad()
        sources = sample["net_input"].get("src_tokens") if self._source is not None else None
        targets = sample.get("target")
        for row, (id, found) in enumerate(zip(sample["id"].tolist(), batch.hypotheses, strict=False)):
            if self.cfg.generation.print_step and not self.interactive and found and "steps" not in found[0]:
                raise PipelineError("--print-step: this model does not generate in steps that refine a whole output")
            yield Sentence(
                id,
                unpadded(sources, row, pad),
                unpadded(targets, row, pad),
                [plain(hypothesis) for hypothesis in found[: self.cfg.generation.nbest]],
                **self._details(batch, row, id),
            )

    def _record(self, item: tuple[Batch, Future[list[Written]]] | None) -> None:
        if item is None:
            self.leave()
            return
        batch, promised = item
        written = promised.result()
        tokens = sum(len(found[0]["tokens"]) for found in batch.hypotheses)
        sample = batch.sample
        self.samples += sample["nsentences"] if "nsentences" in sample else sample["id"].numel()
        self.tokens += tokens
        self.batches += 1
        self.model_seconds += batch.seconds
        self._done(written, tokens)

    def _print(self, written: list[Written]) -> None:
        text = "".join(one.lines for one in written)
        if text:
            self._put(text)
        if self._keep is not None:
            self._keep(written)

    def _put(self, text: str) -> None:
        with writing("standard output" if self._output is sys.stdout else getattr(self._output, "name", "the output")):
            print(text, end="", file=self._output, flush=True)

    def report(self) -> RunReport:
        """Reports samples (sources), and tokens of their best hypotheses. The note is FairSeq's line of the scores.

        Skipped are sources that were too long, in another shard, or in a batch that FairSeq drops.
        """
        notes = [] if self.score is None else [self.score]
        return RunReport(self.samples, self.sources - self.samples, self.tokens, notes=notes)

    # What each command implements.

    def plan(self) -> Iterator[Any]:
        """Yields the samples."""
        raise NotImplementedError

    def _generator(self) -> Any:
        """Returns the generator, with all models ready."""
        raise NotImplementedError

    def _details(self, batch: Batch, row: int, id: int) -> dict[str, Any]:
        """Returns the fields of a `Sentence` besides tokens and hypotheses."""
        raise NotImplementedError

    def _done(self, written: list[Written], tokens: int) -> None:
        """Handles a batch that has become text, with this many generated tokens."""
        raise NotImplementedError

    def leave(self) -> None:
        """Prints what is finished and has waited for something else."""


def log_to(output: TextIO) -> None:
    """Sends FairSeq's messages to the same output as its lines, unless logging is configured already."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=output,
    )
