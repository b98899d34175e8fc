"""`fairseq-generate`: batches of a data directory, scored if there are references. `fairseq-interactive`: lines of a
user or of a file, a buffer at a time. `fairseq-eval-lm`: a language model's perplexity on a data set.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, TextIO

from fastgen.fairseq import fast_layers
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.fairseq.files import check_saved_by_torch, load_models
from fastgen.pipeline.fairseq.formatting import Written
from fastgen.pipeline.fairseq.run import Batch, FairseqRun, Keep, log_to
from fastgen.pipeline.run import RunReport


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
        for lines in _buffers(self.cfg.interactive.input, self.cfg.interactive.buffer_size):
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


def _buffers(name: str, size: int) -> Iterator[list[str]]:
    """Yields the lines of a file or of standard input, `size` at a time, without surrounding white space."""
    with contextlib.ExitStack() as files:
        lines: Iterator[str] = iter(sys.stdin)
        if name != "-":
            with explained("--input"):
                lines = files.enter_context(open(name, encoding="utf-8"))
        with explained("the input cannot be read"):
            while buffer := [line.strip() for line in islice(lines, size)]:
                yield buffer
                if len(buffer) < size:
                    return  # reading a terminal again after its end would ask for more


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
