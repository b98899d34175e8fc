"""What the stages do with the batches of a data set: the steps of `fastgen-generate`.

reading, tokenising, planning -> model -> decoding -> ordered writing
                                                  worker processes: detokenising, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from fastgen.pipeline.journal import Result, bad_result
from fastgen.pipeline.model import Generated, ModelStage
from fastgen.pipeline.planner import Batch, Prepared, Window
from fastgen.pipeline.postprocess import Outcome, PostProcessor, Texts
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.records import BadRecord, Problem
from fastgen.pipeline.stages import Stages
from fastgen.pipeline.tokens import Decoder
from fastgen.pipeline.writers import Output


@dataclass
class _Pending:
    """A batch on its way through post-processing."""

    generated: Generated
    results: list[Result]
    outcomes: Future[list[Outcome]]


class Steps:
    """The steps of one run, and what came out of them. A window goes through all of them as it is."""

    def __init__(
        self,
        model: ModelStage,
        decoder: Decoder,
        post: PostProcessor[Texts, list[Outcome]],
        output: Output,
        progress: Progress,
        on_bad: Callable[[BadRecord], None],
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._workers = post
        self._output = output
        self._progress = progress
        self._on_bad = on_bad
        self.samples = 0
        self.skipped = 0
        self.tokens = 0
        self.batches = 0

    def stages(self, plan: Iterator[Window | Batch]) -> Stages[Window | Batch, Window | Generated, Window | _Pending]:
        """The pipeline of these steps over a plan."""
        return Stages(plan, self._generate, self._post, self._record, self._report)

    def _generate(self, item: Window | Batch) -> Window | Generated:
        return item if isinstance(item, Window) else self._model.run(item)

    def _report(self, item: Window | Generated) -> None:
        if isinstance(item, Window):
            return
        self.batches += 1
        for row, problem in item.failures:
            self._on_bad(_bad(row, problem))

    def _post(self, item: Window | Generated) -> Window | _Pending:
        if isinstance(item, Window):
            return item
        decoded = self._decoder(item)
        outcomes = self._workers.submit([(texts, reference) for _, texts, reference in decoded])
        return _Pending(item, [result for result, _, _ in decoded], outcomes)

    def _record(self, item: Window | _Pending) -> None:
        if isinstance(item, Window):
            self._output.window(item)
            self.skipped += len(item.bad)
            self._progress.add(len(item.bad), 0)
            return
        results = [
            _completed(result, outcome) for result, outcome in zip(item.results, item.outcomes.result(), strict=True)
        ]
        results += [bad_result(_bad(row, problem)) for row, problem in item.generated.failures]
        self._output.batch(item.generated.batch.window, item.generated.batch.index, results)
        good = [result for result in results if "error" not in result]
        tokens = sum(sum(result["output_tokens"]) for result in good)
        self.samples += len(good)
        self.skipped += len(results) - len(good)
        self.tokens += tokens
        self._progress.add(len(results), tokens)
        for result in results:
            if result.get("error") == "post-processing":
                problem = Problem(result["error"], result["message"])
                self._on_bad(BadRecord(result["position"], result["line"], result["id"], problem))


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
