"""Passes messages between two processes, neither of which waits for the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

_log = logging.getLogger("fastgen_serve")
# Follows the last message.
_END: Any = object()


class _Ended(Exception):
    """The other process has closed its end, or has died."""


@contextmanager
def _other_end() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise _Ended from error


class Pipe:
    """One end of a connection, with a reader and a writer thread. Messages that accumulate are sent together.

    Args:
        connection: closed at the end.
        on_message: called with each message, in the reader thread.
        on_end: called once, after which nothing is received or sent: with None after the last message, if the other
            process has closed its end or has died; otherwise with the error on this side, whose traceback is logged.
    """

    def __init__(
        self,
        connection: Connection,
        on_message: Callable[[Any], object],
        on_end: Callable[[BaseException | None], object],
    ) -> None:
        self._connection, self._on_message, self._on_end = connection, on_message, on_end
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._is_first_end = threading.Lock()
        self._reader, self._writer = (
            threading.Thread(target=self._run, args=(work,), daemon=True) for work in (self._read, self._write)
        )
        self._reader.start()
        self._writer.start()

    def send(self, message: Any) -> None:
        """Queues a message of plain data. It is lost if the other process dies."""
        self._outgoing.put(message)

    def close(self, patience: float | None) -> None:
        """Sends the queued messages, and no later ones. Waits at most this many seconds; without a limit if None."""
        self._outgoing.put(_END)
        self._writer.join(patience)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except _Ended:
            # The writer ends silently: the reader may still have messages before their end.
            if threading.current_thread() is self._reader:
                self._end(None)
        except BaseException as error:  # of any kind: otherwise those who wait for an answer would hang
            _log.exception("the pipe between the server and the process of a model has failed")
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            if self._is_first_end.acquire(blocking=False):
                self._on_end(error)
        finally:
            if threading.current_thread() is self._reader:
                self.close(patience=None)
                self._connection.close()

    def _read(self) -> None:
        while True:
            with _other_end():
                batch = self._connection.recv()
            for message in batch:
                self._on_message(message)

    def _write(self) -> None:
        is_last = False
        while not is_last:
            batch = self._taken()
            is_last = batch[-1] is _END
            if messages := batch[:-1] if is_last else batch:
                with _other_end():
                    self._connection.send(messages)

    def _taken(self) -> list[Any]:
        """Returns all queued messages, at least one; nothing follows the last one."""
        batch = [self._outgoing.get()]
        while batch[-1] is not _END:
            try:
                batch.append(self._outgoing.get_nowait())
            except Empty:
                break
        return batch
