"""`fairseq-interactive`: lines of a user's or of a file, a buffer at a time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.fairseq.command import Batch, Command, Keep, Report, log_to
from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.fairseq.formatting import Sentence, Written, unpadded


class _EndOfBuffer:
    """All batches of what an interactive user has said at once have gone by."""


class _Interactive(Command):
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
        return Batch(sample, hypotheses, time.perf_counter() - start)

    def _post(self, item: Any) -> Any:
        if isinstance(item, _EndOfBuffer):
            return item
        return item, self._writers.submit(list(self._sentences(item)))

    def _sentences(self, batch: Batch) -> Iterator[Sentence]:
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


def interact(
    cfg: Any,
    workers: int | None = None,
    output: TextIO | None = None,
    keep: Keep | None = None,
    begins: Callable[[], None] | None = None,
) -> Report:
    """Runs `fairseq-interactive` with a configuration; see `generating.generate`."""
    output = output or sys.stdout
    log_to(output)
    return _Interactive(cfg, output, workers, keep).run(begins)
