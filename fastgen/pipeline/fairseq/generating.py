"""`fairseq-generate`: batches of a data directory, scored where there are references."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any, TextIO

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.fairseq.command import Batch, Command, Keep, Report, log_to
from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.fairseq.formatting import Sentence, Written, unpadded
from fastgen.pipeline.fairseq.loading import load_models


class _Generate(Command):
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
            lms, _ = load_models([cfg.generation.lm_path], None, None, overrides)
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

    def _generate(self, generator: Any, sample: Any) -> Batch:
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
        return Batch(sample, hypotheses, time.perf_counter() - start)

    def _post(self, batch: Batch) -> tuple[Batch, Future[list[Written]]]:
        return batch, self._writers.submit(list(self._sentences(batch)))

    def _sentences(self, batch: Batch) -> Iterator[Sentence]:
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

    def _record(self, item: tuple[Batch, Future[list[Written]]]) -> None:
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
        self._put(f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {self.report.score}\n")


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


def generate(
    cfg: Any,
    workers: int | None = None,
    output: TextIO | None = None,
    keep: Keep | None = None,
    begins: Callable[[], None] | None = None,
) -> Report:
    """Runs `fairseq-generate` with a configuration.

    Args:
        workers: processes that put the outputs into words, by default one for every four cores; 0 for a thread.
        output: where the lines go, by default standard output, or what --results-path says; messages go there as well.
        keep: also given what has been printed, batch by batch.
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
        return _Generate(cfg, output, workers, keep).run(begins)
