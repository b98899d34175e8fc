"""Messages between two processes, of which neither waits for the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

# Behind the last message.
_END: Any = object()


class Pipe:
    """One end of a connection. A thread reads, and a thread writes: what has come up meanwhile goes together.

    Args:
        connection: which this closes at the end.
        on_message: takes each message, in the thread that reads.
        on_end: is called once, in that thread: the other process has closed its end, or is gone.
    """

    def __init__(
        self, connection: Connection, on_message: Callable[[Any], object], on_end: Callable[[], object]
    ) -> None:
        self._connection, self._on_message, self._on_end = connection, on_message, on_end
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Sends a message of plain data, later. It is lost if the other process is gone."""
        self._outgoing.put(message)

    def close(self, patience: float | None) -> None:
        """Sends what there is, and nothing more; waits for so many seconds at the most, or until it is done."""
        self._outgoing.put(_END)
        self._threads[1].join(patience)

    def _read(self) -> None:
        try:
            while True:
                for message in self._connection.recv():
                    self._on_message(message)
        except (EOFError, OSError):
            self._on_end()
            self.close(patience=None)
            self._connection.close()

    def _write(self) -> None:
        try:
            while (batch := self._taken())[-1] is not _END:
                self._connection.send(batch)
            if batch[:-1]:
                self._connection.send(batch[:-1])
        except OSError:
            """The one that reads is told of it."""

    def _taken(self) -> list[Any]:
        """All messages that are there, one at least; nothing comes behind the last one."""
        batch = [self._outgoing.get()]
        while batch[-1] is not _END:
            try:
                batch.append(self._outgoing.get_nowait())
            except Empty:
                break
        return batch
