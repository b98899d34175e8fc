"""Processes texts after the model, in worker processes: detokenising and metrics.

Both are written in Python and would hold the interpreter lock that the model needs. Workers are spawned, not forked,
because the parent has threads and may use CUDA. They import neither torch nor transformers, and end when their parent
ends, even if it is killed. The workers of FairSeq's commands are forked: spawned ones would import for seconds.

For metrics, a worker measures each output by itself and returns a few numbers: counts of n-grams for BLEU and chrF,
three F-scores for ROUGE, 0 or 1 for exact match. The corpus score is computed from their sums at the end. BLEU and chrF
are equal to sacrebleu's to the last digit: the two methods called here are those that its `corpus_score` calls, and the
sums are of integers. The journal keeps the statistics, so a resumed run reports the metrics of all records.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Generic, Literal, TypeVar

from fastgen.pipeline.errors import check_installed, one_line

Item = TypeVar("Item")
Done = TypeVar("Done")

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
_PACKAGES = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge": "rouge_score"}
Statistics = dict[str, list[float]]


def _sacrebleu(name: str) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    # `force` silences a warning about tokenised text, which every worker would print.
    return BLEU(force=True) if name == "bleu" else CHRF()


def _measure(name: str) -> Callable[[str, str], list[float]]:
    if name == "exact":
        return lambda text, reference: [float(text.strip() == reference.strip())]
    if name == "rouge":
        from rouge_score.rouge_scorer import RougeScorer

        # With the stemmer, as in the Transformers summarisation script.
        scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=True)
        return lambda text, reference: [score.fmeasure for score in scorer.score(reference, text).values()]
    metric = _sacrebleu(name)
    return lambda text, reference: list(metric._extract_corpus_statistics([text], [[reference]])[0])


class MetricTotals:
    """The sums of the statistics, and the corpus scores (each from 0 to 100)."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, list[float]] = {}

    def add(self, statistics: Mapping[str, Sequence[float]]) -> None:
        """Adds one output. The last digit of ROUGE depends on the order, so outputs are added in input order."""
        self.samples += 1
        for name, values in statistics.items():
            before = self._sums.get(name, [0] * len(values))
            self._sums[name] = [one + more for one, more in zip(before, values, strict=True)]

    def scores(self) -> dict[str, float]:
        """Returns the corpus scores of all outputs added so far; empty if there is none."""
        scores: dict[str, float] = {}
        for name, sums in self._sums.items():
            if name in ("bleu", "chrf"):
                scores[name] = _sacrebleu(name)._aggregate_and_compute([sums]).score
            elif name == "rouge":
                scores.update({kind: 100 * total / self.samples for kind, total in zip(ROUGE_TYPES, sums, strict=True)})
            else:
                scores[name] = 100 * sums[0] / self.samples
        return scores


@dataclass(frozen=True)
class PostprocessJob:
    detokenizer: str | None = None
    lang: str = "en"
    metrics: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        return self.detokenizer is not None or bool(self.metrics)

    def check(self) -> None:
        """Raises `SetupError` if a package is not installed that the detokenizer or a metric needs."""
        if self.detokenizer:
            check_installed("sacremoses", "the moses detokenizer")
        for name in self.metrics:
            if name in _PACKAGES:
                check_installed(_PACKAGES[name], f"metric {name}")


@dataclass(frozen=True)
class Outcome:
    """The final texts of a record and the statistics of the first one, or the error."""

    texts: list[str]
    statistics: Statistics | None = None
    error: str | None = None


Texts = list[tuple[list[str], str | None]]
"""For every record: its sequences, best first, and its reference."""


class Processor:
    """Does the work, in the process that creates it."""

    def __init__(self, work: PostprocessJob) -> None:
        self._detokenize: Callable[[str], str] = lambda text: text
        if work.detokenizer == "moses":
            from sacremoses import MosesDetokenizer

            moses = MosesDetokenizer(lang=work.lang)
            self._detokenize = lambda text: moses.detokenize(text.split())
        self._measures = {name: _measure(name) for name in work.metrics}

    def __call__(self, records: Texts) -> list[Outcome]:
        return [self._one(texts, reference) for texts, reference in records]

    def _one(self, texts: list[str], reference: str | None) -> Outcome:
        try:
            texts = [self._detokenize(text) for text in texts]
            if reference is None or not self._measures:
                return Outcome(texts)
            return Outcome(texts, {name: measure(texts[0], reference) for name, measure in self._measures.items()})
        except Exception as error:
            return Outcome([], error=one_line(error))


_processor: Callable[[Any], Any] | None = None


def _start_worker(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _processor
    # Ctrl-C reaches all processes of the group. The parent decides what is still finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The model's threads wait for each other at every step. A worker that takes the core of one would delay all.
    if hasattr(os, "nice"):
        os.nice(5)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    torch = sys.modules.get("torch")
    if torch is not None:
        # A forked process has none of torch's threads, and must not free the parent's memory on a device.
        torch.set_num_threads(1)
        gc.freeze()
    _processor = make()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _process(item: Any) -> Any:
    assert _processor is not None
    return _processor(item)


def default_workers() -> int:
    """Returns one worker for every four cores, from 1 to 4: enough for any model that such a machine runs."""
    return max(1, min(4, (os.cpu_count() or 1) // 4))


class PostProcessor(Generic[Item, Done]):
    """Distributes items to worker processes. Without workers, a thread does the work.

    Args:
        make: creates the function that does the work. Called in the worker.
        workers: the number of processes.
        start: how they are started. "spawn" works on every system; `make` must be picklable, and the worker imports
            what it needs. "fork" copies the parent with its modules; the parent must not have threads yet, and workers
            must not use a device. On a system without fork, there are no workers.
    """

    def __init__(
        self, make: Callable[[], Callable[[Item], Done]], workers: int, start: Literal["spawn", "fork"] = "spawn"
    ) -> None:
        self._pool: Executor
        if workers and start in multiprocessing.get_all_start_methods():
            context = multiprocessing.get_context(start)
            self._pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(make,))
            self._work: Callable[[Item], Done] = _process
            for _ in range(workers):  # starting takes about a second, while the model is loaded
                self._pool.submit(os.getpid)
        else:
            self._pool, self._work = ThreadPoolExecutor(1), make()

    def submit(self, item: Item) -> Future[Done]:
        """Returns the future result of an item. A single worker processes the items in order."""
        return self._pool.submit(self._work, item)

    def close(self) -> None:
        """Ends the workers. Work that has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
