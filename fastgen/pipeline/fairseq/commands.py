"""The commands: their set-up, their steps on the stages, and what they print when."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TextIO

from fastgen.pipeline.errors import PipelineError, SetupError, one_line
from fastgen.pipeline.fairseq.explain import explained, reason
from fastgen.pipeline.fairseq.files import saved_by_torch
from fastgen.pipeline.fairseq.words import (
    Hypothesis,
    Pair,
    Scorer,
    Sentence,
    Writer,
    Written,
    dictionaries,
    plain,
    unpadded,
)
from fastgen.pipeline.postprocess import PostProcessor, default_workers
from fastgen.pipeline.stages import Stages, Timing

logger = logging.getLogger("fastgen.fairseq")

# Forking a process that uses the accelerated BLAS of macOS is not safe.
_CAN_FORK = sys.platform == "linux"
Keep = Callable[[list[Written]], None]


@dataclass
class Report:
    """What a run did.

    Attributes:
        sentences, tokens: sources, and tokens of their best hypotheses.
        sources: those that there were, the ones that were too long and left out among them.
        score: FairSeq's line of the scores, or None where there are no references.
        load: seconds until the first batch.
        timing: where the time from then on went.
        finish: seconds from the last batch leaving the model to the end, scoring included.
    """

    sentences: int = 0
    tokens: int = 0
    sources: int = 0
    score: str | None = None
    load: float = 0.0
    finish: float = 0.0
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class _Batch:
    """A batch of FairSeq's, and what the model has made of it."""

    sample: Any
    hypotheses: list[list[Any]]
    seconds: float


class _EndOfBuffer:
    """All batches of what an interactive user has said at once have gone by."""


class _Command:
    """What both commands have in common.

    Args:
        cfg: the configuration.
        output: where the lines go.
        workers: worker processes; 0 does their work in a thread.
        keep: also given what has been printed, batch by batch.
    """

    interactive = False

    def __init__(self, cfg: Any, output: TextIO, workers: int | None, keep: Keep | None = None) -> None:
        self._start = time.perf_counter()
        self.cfg = cfg
        self.report = Report()
        self._output = output
        self._keep = keep
        self._workers = (default_workers() if workers is None else workers) if _CAN_FORK else 0
        self._pending: list[Future[str | None]] = []

    def run(self) -> Report:
        """Everything, from loading to the score. What is finished is printed whatever happens to the rest."""
        from fairseq_cli.generate import get_symbols_to_strip_from_output

        self._load()
        generator = self._generator()
        strip = get_symbols_to_strip_from_output(generator)
        scorer = None if self.interactive else Scorer(self.cfg, self._target)
        writer = Writer(self.task, self.cfg, strip, self.interactive, scorer is not None and scorer.takes_text)
        self._encode = writer.encode
        plan = self._plan()
        with contextlib.ExitStack() as closing:
            self._writers: PostProcessor[list[Sentence], list[Written]] = PostProcessor(
                lambda: writer, self._workers, "fork"
            )
            closing.callback(self._writers.close)
            if scorer is not None:
                self._scorers: PostProcessor[list[Pair], str | None] = PostProcessor(
                    lambda: scorer, min(self._workers, 1), "fork"
                )
                closing.callback(self._scorers.close)
            self.report.load = time.perf_counter() - self._start
            stages = Stages(
                plan, lambda item: self._generate(generator, item), self._post, self._record, read_ahead=False
            )
            try:
                self.report.timing = stages.run()
            finally:
                self._leave()
            end = time.perf_counter() - self.report.timing.draining
            self._finish()
            self.report.finish = time.perf_counter() - end
        return self.report

    def _load(self) -> None:
        """Task and models, in the order in which FairSeq's commands load them: it decides what a seed draws."""
        import numpy as np
        import torch
        from fairseq import tasks, utils

        cfg = self.cfg
        if cfg.common_eval.path is None:
            raise SetupError("--path is needed: the checkpoint to generate with")
        if cfg.generation.sampling and cfg.generation.nbest != cfg.generation.beam:
            raise SetupError("--sampling prints every sample: give --nbest the number that --beam has")
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
        self.models, self.saved = _load_models(paths, self.task, cfg, self.overrides)

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

    def _inference(self, generator: Any, sample: Any, **options: Any) -> list[list[Any]]:
        """What the model makes of a batch. Raises a PipelineError that says what the matter is."""
        try:
            return self.task.inference_step(generator, self.models, sample, **options)
        except Exception as error:
            unknown = self._unknown_token(sample)
            if unknown is not None:
                raise PipelineError(unknown) from error
            raise PipelineError(f"the model failed: {type(error).__name__}: {reason(error)}") from error

    def _unknown_token(self, sample: Any) -> str | None:
        """A token that is in the data and not in the dictionary: what a damaged data set looks like to a model."""
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

    def _hypotheses(self, found: list[Any]) -> list[Hypothesis]:
        prints_steps = self.cfg.generation.print_step and not self.interactive
        if prints_steps and found and "steps" not in found[0]:
            raise PipelineError("--print-step: this model does not generate in steps that refine a whole output")
        return [plain(hypothesis) for hypothesis in found[: self.cfg.generation.nbest]]

    def _count(self, batch: _Batch, sentences: int) -> int:
        """Counts a batch; returns its tokens."""
        tokens = sum(len(found[0]["tokens"]) for found in batch.hypotheses)
        self.report.sentences += sentences
        self.report.tokens += tokens
        return tokens

    def _print(self, written: list[Written]) -> None:
        text = "".join(one.lines for one in written)
        if text:
            print(text, end="", file=self._output, flush=True)
        if self._keep is not None:
            self._keep(written)

    # What a command has of its own.

    def _generator(self) -> Any:
        raise NotImplementedError

    def _plan(self) -> Iterator[Any]:
        raise NotImplementedError

    def _generate(self, generator: Any, item: Any) -> Any:
        raise NotImplementedError

    def _post(self, item: Any) -> Any:
        raise NotImplementedError

    def _record(self, item: Any) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        """Prints what is finished and has waited for something else, also when the run has been interrupted."""

    def _finish(self) -> None:
        """What is left to do when all lines are printed."""


class _Generate(_Command):
    """`fairseq-generate`."""

    def _generator(self) -> Any:
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
            lms, _ = _load_models([cfg.generation.lm_path], None, None, overrides)
            if isinstance(lms[0], FairseqEncoderDecoderModel):
                raise SetupError(f"--lm-path: {cfg.generation.lm_path} is not a language model")
        self._ready(model for model in chain(self.models, lms) if model is not None)
        self._batches = self._iterator(subset)
        self.report.sources = len(self.task.dataset(subset))
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

    def _plan(self) -> Iterator[Any]:
        self._progress = _Progress(self.cfg, len(self._batches))
        self._has_target = False
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        subset = self.cfg.dataset.gen_subset
        with explained(f"subset {subset} of {self.cfg.task.data} cannot be read"):
            for sample in self._batches:
                if "net_input" in sample:
                    yield sample

    def _generate(self, generator: Any, sample: Any) -> _Batch:
        from fairseq import utils

        start = time.perf_counter()
        moved = utils.move_to_cuda(sample) if self.cuda else sample
        size = self.cfg.generation.prefix_size
        if self.cfg.generation.constraints and moved.get("constraints") is None:
            raise SetupError(
                "--constraints: the data have none (fastgen-interactive-for-fairseq takes them with a text)"
            )
        hypotheses = self._inference(
            generator,
            moved,
            prefix_tokens=moved["target"][:, :size] if size > 0 else None,
            constraints=moved.get("constraints"),
        )
        return _Batch(sample, hypotheses, time.perf_counter() - start)

    def _post(self, batch: _Batch) -> tuple[_Batch, Future[list[Written]]]:
        return batch, self._writers.submit(list(self._sentences(batch)))

    def _sentences(self, batch: _Batch) -> Iterator[Sentence]:
        sample, pad = batch.sample, self._target.pad()
        sources = sample["net_input"].get("src_tokens") if self._source is not None else None
        targets = sample["target"]
        subset = self.task.dataset(self.cfg.dataset.gen_subset)
        for row, (id, found) in enumerate(zip(sample["id"].tolist(), batch.hypotheses, strict=False)):
            original = None
            if self.cfg.generation.replace_unk is not None:
                original = subset.src.get_original_text(id), subset.tgt.get_original_text(id)
            yield Sentence(
                id,
                unpadded(sources, row, pad),
                unpadded(targets, row, pad),
                self._hypotheses(found),
                original,
            )

    def _record(self, item: tuple[_Batch, Future[list[Written]]]) -> None:
        batch, promised = item
        written = promised.result()
        self._print(written)
        pairs = [one.pair for one in written if one.pair is not None]
        if pairs:
            self._has_target = True
            self._pending.append(self._scorers.submit(pairs))
        sample = batch.sample
        sentences = sample["nsentences"] if "nsentences" in sample else sample["id"].numel()
        self._progress.add(self._count(batch, sentences))

    def _finish(self) -> None:
        self._progress.close()
        if not self._has_target:
            return
        with explained("the scores cannot be computed"):
            for pending in self._pending:
                pending.result()
            self.report.score = self._scorers.submit([]).result()
        cfg = self.cfg
        print(
            f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {self.report.score}",
            file=self._output,
            flush=True,
        )


class _Interactive(_Command):
    """`fairseq-interactive`. Lines are read in the thread of the model, which then is not ahead of its user."""

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

    def _plan(self) -> Iterator[Any]:
        from fairseq_cli.interactive import make_batches

        positions = self._positions()
        first = 0
        for lines in _buffers(self.cfg.interactive.input, self.cfg.interactive.buffer_size):
            count = len(lines)
            with explained("the input cannot be used"):
                for batch in make_batches(lines, self.cfg, self.task, positions, self._encode):
                    yield first, batch
            yield _EndOfBuffer()
            first += count
            self.report.sources = first

    def _generate(self, generator: Any, item: Any) -> Any:
        from fairseq import utils

        if isinstance(item, _EndOfBuffer):
            return item
        first, batch = item
        sample = {"net_input": {"src_tokens": batch.src_tokens, "src_lengths": batch.src_lengths}}
        moved, constraints = sample, batch.constraints
        if self.cuda:
            moved = utils.move_to_cuda(sample)
            constraints = constraints.cuda() if constraints is not None else None
        start = time.perf_counter()
        hypotheses = self._inference(generator, moved, constraints=constraints)
        sample |= {"id": batch.ids + first, "constraints": batch.constraints}
        return _Batch(sample, hypotheses, time.perf_counter() - start)

    def _post(self, item: Any) -> Any:
        if isinstance(item, _EndOfBuffer):
            return item
        return item, self._writers.submit(list(self._sentences(item)))

    def _sentences(self, batch: _Batch) -> Iterator[Sentence]:
        from fairseq.token_generation_constraints import unpack_constraints

        sample, pad = batch.sample, self._target.pad()
        sources = sample["net_input"]["src_tokens"] if self._source is not None else None
        for row, (id, found) in enumerate(zip(sample["id"].tolist(), batch.hypotheses, strict=False)):
            constraints = []
            if self.cfg.generation.constraints:
                constraints = [tokens.tolist() for tokens in unpack_constraints(sample["constraints"][row])]
            yield Sentence(
                id,
                unpadded(sources, row, pad),
                None,
                self._hypotheses(found),
                constraints=constraints,
                seconds=batch.seconds / len(batch.hypotheses),
            )

    def _record(self, item: Any) -> None:
        if isinstance(item, _EndOfBuffer):
            self._leave()
            return
        batch, promised = item
        self._buffer += promised.result()
        self._count(batch, len(batch.hypotheses))

    def _leave(self) -> None:
        written, self._buffer = sorted(self._buffer, key=lambda written: written.id), []
        self._print(written)


def generate(cfg: Any, workers: int | None = None, output: TextIO | None = None, keep: Keep | None = None) -> Report:
    """Runs `fairseq-generate` with a configuration.

    Args:
        workers: processes that put the outputs into words, by default one for every four cores; 0 for a thread.
        output: where the lines go, by default standard output, or what --results-path says; messages go there as well.
        keep: also given what has been printed, batch by batch.

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
        return _Generate(cfg, output, workers, keep).run()


def interact(cfg: Any, workers: int | None = None, output: TextIO | None = None, keep: Keep | None = None) -> Report:
    """Runs `fairseq-interactive` with a configuration; see `generate`."""
    output = output or sys.stdout
    log_to(output)
    return _Interactive(cfg, output, workers, keep).run()


def evaluate(cfg: Any) -> None:
    """Runs `fairseq-eval-lm` with a configuration, on faster layers. Its numbers go to the log, as FairSeq's do.

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
        from fastgen.decoding.layers import FastLayers

        with contextlib.ExitStack() as layers:
            for model in models:
                layers.enter_context(FastLayers.of(model))
            return own(models, *args, **kwargs)

    eval_lm.eval_lm = on_fast_layers
    try:
        with explained(f"{cfg.common_eval.path} cannot be evaluated on {cfg.task.data}"):
            _look_at(utils.split_paths(cfg.common_eval.path))
            distributed.call_main(cfg, eval_lm.main)
    finally:
        eval_lm.eval_lm = own


class _Progress:
    """FairSeq's progress bar, a step for every batch that is printed, in the format that its options ask for."""

    def __init__(self, cfg: Any, batches: int) -> None:
        from fairseq.logging import meters, progress_bar

        self._bar = progress_bar.progress_bar(
            range(batches),
            log_format=cfg.common.log_format,
            log_interval=cfg.common.log_interval,
            default_log_format="simple" if cfg.common.no_progress_bar else "tqdm",
        )
        self._steps = iter(self._bar)
        self._rate = meters.TimeMeter()

    def add(self, tokens: int) -> None:
        """A batch with so many generated tokens is done."""
        next(self._steps, None)
        self._rate.update(tokens)
        self._bar.log({"wps": round(self._rate.avg)})

    def close(self) -> None:
        """All are done."""
        next(self._steps, None)


def log_to(output: TextIO) -> None:
    """FairSeq's messages go where its lines go, unless they go somewhere already."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=output,
    )


def _load_models(paths: list[str], task: Any, cfg: Any, overrides: Any) -> tuple[list[Any], Any]:
    """The models of checkpoints and the configuration in them; without `cfg`, models with a task of their own."""
    from fairseq import checkpoint_utils
    from fairseq.models import FairseqLanguageModel
    from fairseq.tasks.translation import TranslationTask

    shards: dict[str, Any] = {}
    if cfg is not None:
        count = cfg.checkpoint.checkpoint_shard_count
        shards = {"suffix": cfg.checkpoint.checkpoint_suffix, "strict": count == 1, "num_shards": count}
    named = os.pathsep.join(paths)
    with explained(f"checkpoint {named} cannot be used" + (f" for task {cfg.task._name}" if cfg is not None else "")):
        logger.info("loading %s", named)
        _look_at(paths)
        try:
            models, saved = checkpoint_utils.load_model_ensemble(paths, arg_overrides=overrides, task=task, **shards)
        except (KeyError, AttributeError) as error:
            lacking = f"no {one_line(error)}" if isinstance(error, KeyError) else one_line(error)
            raise SetupError(
                f"checkpoint {named} is of another architecture than it says, or for another task: {lacking}"
            ) from error
        if isinstance(task, TranslationTask) and any(isinstance(model, FairseqLanguageModel) for model in models):
            raise SetupError(f"checkpoint {named} is a language model: --task language_modeling generates with it")
    return models, saved


def _look_at(paths: list[str]) -> None:
    """Raises a ValueError for a file that is no checkpoint, of which torch would only say what it has stumbled over."""
    for path in paths:
        if os.path.isfile(path) and not saved_by_torch(path):
            raise ValueError(f"{path} is nothing that torch has saved")


def _buffers(name: str, size: int) -> Iterator[list[str]]:
    """The lines of a file or of standard input, so many at a time, without white space around them."""
    with contextlib.ExitStack() as files:
        lines: Iterable[str] = sys.stdin
        if name != "-":
            with explained("--input"):
                lines = files.enter_context(open(name, encoding="utf-8"))
        buffer: list[str] = []
        with explained("the input cannot be read"):
            for line in lines:
                buffer.append(line.strip())
                if len(buffer) >= size:
                    yield buffer
                    buffer = []
        if buffer:
            yield buffer
