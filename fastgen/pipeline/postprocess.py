"""What happens to a text after the model, and where.

Detokenising with sacremoses and measuring are Python, so they would take the interpreter lock from the model; they run
in worker processes. Workers are spawned, not forked (the parent has threads and may hold a CUDA context), import
neither torch nor transformers, and end with their parent however it ends. Those of FairSeq's commands are forked: what
they need would take them seconds to import.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Generic, Literal, TypeVar

from fastgen.pipeline.errors import SetupError, one_line
from fastgen.pipeline.metrics import Statistics, sentence_statistics

Item = TypeVar("Item")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Work:
    """What is to be done with every output."""

    detokenizer: str | None = None
    lang: str = "en"
    metrics: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return self.detokenizer is not None or bool(self.metrics)

    def processor(self) -> Processor:
        """What does it."""
        return Processor(self)

    def check(self) -> None:
        """A SetupError where the detokenizer is not installed."""
        if self.detokenizer and importlib.util.find_spec("sacremoses") is None:
            raise SetupError("the moses detokenizer needs the package sacremoses, which is not installed")


@dataclass(frozen=True)
class Outcome:
    """The final texts of one record with their statistics, or why there are none."""

    texts: list[str]
    statistics: Statistics | None = None
    error: str | None = None


Texts = list[tuple[list[str], str | None]]
"""For every record: its sequences, best first, and its reference."""


class Processor:
    """Does the work, in whichever process it is made."""

    def __init__(self, work: Work) -> None:
        self._detokenize: Callable[[str], str] = lambda text: text
        if work.detokenizer == "moses":
            from sacremoses import MosesDetokenizer

            moses = MosesDetokenizer(lang=work.lang)
            self._detokenize = lambda text: moses.detokenize(text.split())
        self._measure = sentence_statistics(work.metrics) if work.metrics else None

    def __call__(self, records: Texts) -> list[Outcome]:
        return [self._one(texts, reference) for texts, reference in records]

    def _one(self, texts: list[str], reference: str | None) -> Outcome:
        try:
            texts = [self._detokenize(text) for text in texts]
            measured = self._measure(texts[0], reference) if self._measure and reference is not None else None
        except Exception as error:
            return Outcome([], error=one_line(error))
        return Outcome(texts, measured)


_processor: Callable[[Any], Any] | None = None


def _start_worker(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _processor
    # Ctrl-C reaches the whole process group; the parent decides what is still to be finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The model's threads wait for one another at every step: a worker that takes a core from one of them stops all.
    if hasattr(os, "nice"):
        os.nice(5)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    torch = sys.modules.get("torch")
    if torch is not None:
        # A forked process has none of the threads that torch would hand work to, and must not free what the parent has
        # on a device.
        torch.set_num_threads(1)
        gc.freeze()
    _processor = make()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _ready() -> bool:
    return _processor is not None


def _process(item: Any) -> Any:
    assert _processor is not None
    return _processor(item)


def default_workers() -> int:
    """One worker for every four cores, at least one: they keep up with far larger models than those cores run."""
    return max(1, min(4, (os.cpu_count() or 1) // 4))


class PostProcessor(Generic[Item, Done]):
    """Hands items to workers, or does the work on the spot where there are none.

    Args:
        make: makes what does the work, in the worker.
        workers: processes.
        start: how they are started. "spawn" imports what `make` needs, which has to be picklable, and nothing else.
            "fork" finds everything that is there already; it is for a process that has no threads yet and does not
            use the device in its workers. Only the former is there on every system.
    """

    def __init__(
        self, make: Callable[[], Callable[[Item], Done]], workers: int, start: Literal["spawn", "fork"] = "spawn"
    ) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._local: Callable[[Item], Done] | None = None
        self.workers = workers if start in multiprocessing.get_all_start_methods() else 0
        if self.workers:
            context = multiprocessing.get_context(start)
            self._pool = ProcessPoolExecutor(self.workers, context, initializer=_start_worker, initargs=(make,))
            # Starting takes a second: have it over by the time the model is loaded.
            self._warm = [self._pool.submit(_ready) for _ in range(self.workers)]
        else:
            self._local = make()

    def submit(self, item: Item) -> Future[Done]:
        """What will come of an item. A single worker does them in the order in which they are submitted."""
        if self._pool is not None:
            return self._pool.submit(_process, item)
        assert self._local is not None
        future: Future[Done] = Future()
        future.set_result(self._local(item))
        return future

    def close(self) -> None:
        """End the workers; work that has not been begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
