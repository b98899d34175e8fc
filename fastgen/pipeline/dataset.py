"""What the stages do with the batches of a data set: the steps of `fastgen-generate`.

reading, tokenising, planning -> model -> decoding -> ordered writing
                                                  worker processes: detokenising, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from fastgen.pipeline.model import Generated, ModelStage
from fastgen.pipeline.planner import Batch, Window
from fastgen.pipeline.postprocess import Outcome, PostProcessor, Texts
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.records import BadRecord, Result
from fastgen.pipeline.stages import Timing, run_stages
from fastgen.pipeline.tokens import Decoder
from fastgen.pipeline.writers import Output

# A batch on its way through post-processing.
_Pending = tuple[Generated, list[Result], Future[list[Outcome]]]


@dataclass
class Steps:
    """The steps of one run, and what came out of them. A window goes through all of them as it is."""

    model: ModelStage
    decoder: Decoder
    workers: PostProcessor[Texts, list[Outcome]]
    output: Output
    progress: Progress
    on_bad: Callable[[BadRecord], None]
    samples: int = 0
    tokens: int = 0
    batches: int = 0

    def run(self, plan: Iterator[Window | Batch]) -> Timing:
        return run_stages(plan, self._generate, self._post, self._record, self._report)

    def _generate(self, item: Window | Batch) -> Window | Generated:
        return item if isinstance(item, Window) else self.model.run(item)

    def _report(self, item: Window | Generated) -> None:
        if isinstance(item, Generated):
            self.batches += 1
            for row, problem in item.failures:
                self.on_bad(row.record.skipped(problem))

    def _post(self, item: Window | Generated) -> Window | _Pending:
        if isinstance(item, Window):
            return item
        decoded = self.decoder(item)
        outcomes = self.workers.submit([(texts, reference) for _, texts, reference in decoded])
        return item, [result for result, _, _ in decoded], outcomes

    def _record(self, item: Window | _Pending) -> None:
        if isinstance(item, Window):
            self.output.window(item)
            self.progress.add(len(item.bad), 0)
            return
        generated, decoded, outcomes = item
        results = [_completed(result, outcome) for result, outcome in zip(decoded, outcomes.result(), strict=True)]
        failed = [result for result in results if "error" in result]
        tokens = sum(sum(result["output_tokens"]) for result in results if "error" not in result)
        self.samples += len(results) - len(failed)
        self.tokens += tokens
        results += [row.record.skipped(problem).result() for row, problem in generated.failures]
        self.output.batch(generated.batch.window, generated.batch.index, results)
        self.progress.add(len(results), tokens)
        for result in failed:
            self.on_bad(BadRecord.of(result))


def _completed(result: Result, outcome: Outcome) -> Result:
    if outcome.error is not None:
        kept = {name: result[name] for name in ("position", "line", "id")}
        return kept | {"error": "post-processing", "message": outcome.error}
    complete = result | {"text": outcome.texts[0], "statistics": outcome.statistics}
    # An output of text lines has the best sequence only; a record with scores has them all.
    if "input" in result:
        complete["sequences"] = outcome.texts
    return complete
