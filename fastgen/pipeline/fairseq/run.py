"""FairSeq's commands as runs of the pipeline.

`generate` runs batches of a data directory, scored if there are references. `interact` runs lines of a user or of a
file, a buffer at a time. `evaluate` computes a language model's perplexity on a data set.
"""

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
from itertools import chain
from typing import Any, TextIO

from fastgen.fairseq import fast_layers
from fastgen.pipeline.errors import PipelineError, SetupError, writing
from fastgen.pipeline.fairseq.files import (
    Pair,
    Scorer,
    Sentence,
    Writer,
    Written,
    check_saved_by_torch,
    dictionaries,
    explained,
    lines_in,
    load_models,
    log_to,
    plain,
    reason,
    unknown_token,
    unpadded,
)
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
            unknown = unknown_token(moved, self._source, self._target)
            if unknown is not None:
                raise PipelineError(unknown) from error
            raise PipelineError(f"the model failed: {type(error).__name__}: {reason(error)}") from error
        return Batch(sample, hypotheses, time.perf_counter() - start)

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


class Generate(FairseqRun):
    def _generator(self) -> Any:
        from fairseq.logging import meters, progress_bar
        from fairseq.models import FairseqEncoderDecoderModel

        cfg = self.cfg
        if cfg.generation.replace_unk is not None and cfg.dataset.dataset_impl != "raw":
            raise SetupError("--replace-unk needs the texts themselves: --dataset-impl raw")
        if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
            cfg.dataset.max_tokens = 12000
        subset = cfg.dataset.gen_subset
        with explained(f"subset {subset} of {cfg.task.data} cannot be read"):
            self.task.load_dataset(subset, task_cfg=self.saved.task)
        lms: list[Any] = [None]
        if cfg.generation.lm_path is not None:
            overrides = self.overrides | {"data": cfg.task.data}
            lms, _ = load_models([cfg.generation.lm_path], None, None, overrides)
            if isinstance(lms[0], FairseqEncoderDecoderModel):
                raise SetupError(f"--lm-path: {cfg.generation.lm_path} is not a language model")
        self._ready(model for model in chain(self.models, lms) if model is not None)
        self._batches = self._iterator(subset)
        self._bar = progress_bar.progress_bar(
            range(len(self._batches)),
            log_format=cfg.common.log_format,
            log_interval=cfg.common.log_interval,
            default_log_format="simple" if cfg.common.no_progress_bar else "tqdm",
        )
        self._steps, self._rate = iter(self._bar), meters.TimeMeter()
        self.sources = len(self.task.dataset(subset))
        extra = {"lm_model": lms[0], "lm_weight": cfg.generation.lm_weight}
        with explained("the generator cannot be set up"):
            return self.task.build_generator(self.models, cfg.generation, extra_gen_cls_kwargs=extra)

    def _iterator(self, subset: str) -> Any:
        cfg = self.cfg
        with explained(f"subset {subset} of {cfg.task.data} cannot be read"):
            return self.task.get_batch_iterator(
                dataset=self.task.dataset(subset),
                max_tokens=cfg.dataset.max_tokens,
                max_sentences=cfg.dataset.batch_size,
                max_positions=self._positions(),
                ignore_invalid_inputs=cfg.dataset.skip_invalid_size_inputs_valid_test,
                required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
                seed=cfg.common.seed,
                num_shards=cfg.distributed_training.distributed_world_size,
                shard_id=cfg.distributed_training.distributed_rank,
                num_workers=cfg.dataset.num_workers,
                data_buffer_size=cfg.dataset.data_buffer_size,
            ).next_epoch_itr(shuffle=False)

    def plan(self) -> Iterator[Any]:
        with explained(f"subset {self.cfg.dataset.gen_subset} of {self.cfg.task.data} cannot be read"):
            for sample in self._batches:
                if "net_input" in sample:
                    yield sample

    def _details(self, batch: Batch, row: int, id: int) -> dict[str, Any]:
        if self.cfg.generation.replace_unk is None:
            return {}
        subset = self.task.dataset(self.cfg.dataset.gen_subset)
        return {"original": (subset.src.get_original_text(id), subset.tgt.get_original_text(id))}

    def _done(self, written: list[Written], tokens: int) -> None:
        self._print(written)
        pairs = [one.pair for one in written if one.pair is not None]
        if pairs:
            self._pending.append(self._scorers.submit(pairs))
        next(self._steps, None)
        self._rate.update(tokens)
        self._bar.log({"wps": round(self._rate.avg)})

    def finish(self) -> None:
        next(self._steps, None)  # closes the bar
        if not self._pending:
            return
        with explained("the scores cannot be computed"):
            for pending in self._pending:
                pending.result()
            self.score = self._scorers.submit([]).result()
        cfg = self.cfg
        self._put(f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {self.score}\n")


class Interactive(FairseqRun):
    """`fairseq-interactive`. The model's thread reads the lines, so that it does not get ahead of its user."""

    interactive = True

    def _generator(self) -> Any:
        cfg = self.cfg
        cfg.interactive.buffer_size = max(cfg.interactive.buffer_size, 1)
        if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
            cfg.dataset.batch_size = 1
        if cfg.dataset.batch_size and cfg.dataset.batch_size > cfg.interactive.buffer_size:
            raise SetupError("--batch-size is larger than --buffer-size, which says how many lines are read at once")
        self._ready(self.models)
        self._buffer: list[Written] = []
        with explained("the generator cannot be set up"):
            return self.task.build_generator(self.models, cfg.generation)

    def plan(self) -> Iterator[Any]:
        from fairseq_cli.interactive import make_batches

        positions = self._positions()
        first = 0
        for lines in lines_in(self.cfg.interactive.input, self.cfg.interactive.buffer_size):
            count = len(lines)
            with explained("the input cannot be used"):
                for batch in make_batches(lines, self.cfg, self.task, positions, self._writer.encode):
                    yield {
                        "id": batch.ids + first,
                        "net_input": {"src_tokens": batch.src_tokens, "src_lengths": batch.src_lengths},
                        "constraints": batch.constraints,
                    }
            yield None
            first += count
            self.sources = first

    def _details(self, batch: Batch, row: int, id: int) -> dict[str, Any]:
        from fairseq.token_generation_constraints import unpack_constraints

        constraints = []
        if self.cfg.generation.constraints:
            constraints = [tokens.tolist() for tokens in unpack_constraints(batch.sample["constraints"][row])]
        return {"constraints": constraints, "seconds": batch.seconds / len(batch.hypotheses)}

    def _done(self, written: list[Written], tokens: int) -> None:
        self._buffer += written

    def leave(self) -> None:
        """Prints what is finished and has waited for the rest of its buffer, even if the run has been interrupted."""
        written, self._buffer = sorted(self._buffer, key=lambda written: written.result["id"]), []
        self._print(written)


def generate(
    cfg: Any,
    workers: int | None = None,
    output: TextIO | None = None,
    keep: Keep | None = None,
    begins: Callable[[], None] = lambda: None,
) -> RunReport:
    """Runs `fairseq-generate` with a configuration.

    Args:
        workers: processes that turn outputs into text, by default one for every four cores; 0 for a thread.
        output: where the lines go, by default standard output, or the file of --results-path; messages go there, too.
        keep: also receives what has been printed, batch by batch.
        begins: called when everything is loaded, before anything is printed.

    Raises:
        SetupError: something that the configuration names is missing, damaged or does not fit the rest.
        PipelineError: the model or the data failed later on; what was finished by then has been printed.
    """
    folder = cfg.common_eval.results_path
    with contextlib.ExitStack() as files:
        if output is None and folder is not None:
            path = os.path.join(folder, f"generate-{cfg.dataset.gen_subset}.txt")
            with explained(f"cannot write {path}"):
                os.makedirs(folder, exist_ok=True)
                output = files.enter_context(open(path, "w", buffering=1, encoding="utf-8"))
        output = output or sys.stdout
        log_to(output)
        return Generate(cfg, output, workers, keep).run(begins)


def interact(
    cfg: Any,
    workers: int | None = None,
    output: TextIO | None = None,
    keep: Keep | None = None,
    begins: Callable[[], None] = lambda: None,
) -> RunReport:
    """Runs `fairseq-interactive` with a configuration; see `generate`."""
    output = output or sys.stdout
    log_to(output)
    return Interactive(cfg, output, workers, keep).run(begins)


def evaluate(cfg: Any) -> None:
    """Runs `fairseq-eval-lm` with a configuration, on faster layers. Its numbers go to the log, like FairSeq's.

    Raises:
        SetupError: it failed.
    """
    from fairseq import utils
    from fairseq.distributed import utils as distributed
    from fairseq_cli import eval_lm

    if cfg.common_eval.path is None:
        raise SetupError("--path is needed: the checkpoint to evaluate")
    log_to(sys.stdout)
    own = eval_lm.eval_lm

    def on_fast_layers(models: list[Any], *args: Any, **kwargs: Any) -> Any:
        with fast_layers(models):
            return own(models, *args, **kwargs)

    eval_lm.eval_lm = on_fast_layers
    try:
        with explained(f"{cfg.common_eval.path} cannot be evaluated on {cfg.task.data}"):
            check_saved_by_torch(utils.split_paths(cfg.common_eval.path))
            distributed.call_main(cfg, eval_lm.main)
    finally:
        eval_lm.eval_lm = own
