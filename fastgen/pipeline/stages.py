"""The stages of a run and the threads that they run in.

    reading, tokenising, planning -> [ready] -> model -> [generated] -> decoding -> [writing] -> ordered writing
            (a thread)                      (this thread)              (a thread)            (a thread)
                                                                      worker processes: detokenising, metrics

The model runs in the calling thread, where Ctrl-C arrives. What is ahead of it holds a few batches ready; what is
behind it has a long queue, because a finished batch is small and the model must never wait for it to be dealt with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from fastgen.pipeline.channel import Cancelled, Channel
from fastgen.pipeline.journal import Result, bad_result
from fastgen.pipeline.model import Generated, ModelStage
from fastgen.pipeline.planner import Batch, Prepared, Window
from fastgen.pipeline.postprocess import Outcome, PostProcessor
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.readers import BadRecord, Problem
from fastgen.pipeline.tokens import Decoder
from fastgen.pipeline.writers import Output

BATCHES_AHEAD = 16
BATCHES_BEHIND = 512


@dataclass
class Timing:
    """Where the wall time of the model stage went, and what came out in it."""

    wall: float = 0.0
    """From the start of the stages to the last batch leaving the model."""
    waiting_for_input: float = 0.0
    waiting_for_output: float = 0.0
    draining: float = 0.0
    """From the last batch leaving the model to the last record being recorded."""
    samples: int = 0
    skipped: int = 0
    tokens: int = 0
    batches: int = 0


@dataclass
class _Pending:
    """A batch on its way through post-processing."""

    generated: Generated
    results: list[Result]
    outcomes: Future[list[Outcome]]


class Stages:
    """One run of the pipeline."""

    def __init__(
        self,
        plan: Iterator[Window | Batch],
        model: ModelStage,
        decoder: Decoder,
        post: PostProcessor,
        output: Output,
        progress: Progress,
        on_bad: Callable[[BadRecord], None],
    ) -> None:
        self._plan = plan
        self._model = model
        self._decoder = decoder
        self._post = post
        self._output = output
        self._progress = progress
        self._on_bad = on_bad
        self._failure: BaseException | None = None
        self._ready: Channel[Window | Batch] = Channel(BATCHES_AHEAD)
        self._generated: Channel[Window | Generated] = Channel(BATCHES_BEHIND)
        self._writing: Channel[Window | _Pending] = Channel(BATCHES_BEHIND)
        self.timing = Timing()

    def run(self) -> Timing:
        """Work through the plan. An interrupt or a failure is raised once all finished batches are written."""
        threads = [
            threading.Thread(target=self._guarded, args=(stage,), name=f"fastgen-{name}", daemon=True)
            for name, stage in (("plan", self._planning), ("decode", self._decoding), ("write", self._recording))
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            try:
                self._modelling()
            finally:
                # Whatever happened: nothing more is read, and all that is finished is written.
                self._ready.cancel()
                self._generated.finish()
                self.timing.wall = time.perf_counter() - start
                self.timing.waiting_for_input = self._ready.seconds_empty
                self.timing.waiting_for_output = self._generated.seconds_full
                for thread in threads:
                    thread.join()
                self.timing.draining = time.perf_counter() - start - self.timing.wall
        except Cancelled:
            pass
        except BaseException:
            # A second interrupt lands here too, while the threads are being waited for.
            self._cancel()
            raise
        if self._failure is not None:
            raise self._failure
        return self.timing

    def _guarded(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except Cancelled:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first failure of a thread stops the run. A planner's leaves what is behind the model to finish."""
        self._failure = self._failure or error
        self._ready.cancel()
        if threading.current_thread().name != "fastgen-plan":
            self._cancel()

    def _cancel(self) -> None:
        for channel in (self._ready, self._generated, self._writing):
            channel.cancel()

    def _planning(self) -> None:
        for item in self._plan:
            self._ready.put(item)
        self._ready.finish()

    def _modelling(self) -> None:
        for item in self._ready:
            if isinstance(item, Window):
                self._generated.put(item)
                continue
            generated = self._model.run(item)
            self._generated.put(generated)
            self.timing.batches += 1
            for row, problem in generated.failures:
                self._on_bad(_bad(row, problem))
        if self._failure is None:
            self._model.finish()

    def _decoding(self) -> None:
        for item in self._generated:
            if isinstance(item, Window):
                self._writing.put(item)
                continue
            decoded = self._decoder(item)
            outcomes = self._post.submit([(texts, reference) for _, texts, reference in decoded])
            self._writing.put(_Pending(item, [result for result, _, _ in decoded], outcomes))
        self._writing.finish()

    def _recording(self) -> None:
        for item in self._writing:
            if isinstance(item, Window):
                self._output.window(item)
                self.timing.skipped += len(item.bad)
                self._progress.add(len(item.bad), 0)
                continue
            results = [
                _completed(result, outcome)
                for result, outcome in zip(item.results, item.outcomes.result(), strict=True)
            ]
            results += [bad_result(_bad(row, problem)) for row, problem in item.generated.failures]
            self._output.batch(item.generated.batch.window, item.generated.batch.index, results)
            good = [result for result in results if "error" not in result]
            tokens = sum(sum(result["output_tokens"]) for result in good)
            self.timing.samples += len(good)
            self.timing.skipped += len(results) - len(good)
            self.timing.tokens += tokens
            self._progress.add(len(results), tokens)
            for result in results:
                if result.get("error") == "post-processing":
                    self._on_bad(
                        BadRecord(
                            result["position"],
                            result["line"],
                            result["id"],
                            Problem(result["error"], result["message"]),
                        )
                    )


def _bad(row: Prepared, problem: Problem) -> BadRecord:
    return BadRecord(row.record.position, row.record.line, row.record.id, problem)


def _completed(result: Result, outcome: Outcome) -> Result:
    if outcome.error is not None:
        kept = {name: result[name] for name in ("position", "line", "id")}
        return kept | {"error": "post-processing", "message": outcome.error}
    complete = result | {"text": outcome.texts[0], "statistics": outcome.statistics}
    # An output of text lines has the best sequence only; a record with scores has them all.
    if "input" in result:
        complete["sequences"] = outcome.texts
    return complete
