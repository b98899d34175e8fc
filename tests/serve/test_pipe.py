"""A pipe that ends: as the other end does, or as something fails."""

from __future__ import annotations

import logging
import threading
from multiprocessing import Pipe as connected
from typing import Any

import pytest

from fastgen_serve.workers import pipe
from fastgen_serve.workers.pipe import Pipe
from tests.serve.servers import WAIT


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged, whatever libraries of other tests have done to loggers."""
    lines: list[str] = []
    logger, handler = logging.Logger("of the test"), logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logger.addHandler(handler)
    monkeypatch.setattr(pipe, "_log", logger)
    return lines


class End:
    """One end, and what has come of it. The other one is a plain connection."""

    def __init__(self, on_message: Any) -> None:
        self.other, own = connected()
        self.ends: list[BaseException | None] = []
        self.has_ended = threading.Event()
        self.pipe = Pipe(own, on_message, self._end)

    def _end(self, error: BaseException | None) -> None:
        self.ends.append(error)
        self.has_ended.set()

    def is_closed(self) -> bool:
        """Whether the other end is told."""
        assert self.other.poll(WAIT)
        with pytest.raises(EOFError):
            self.other.recv()
        return True


def test_all_messages_come_before_the_end() -> None:
    found: list[Any] = []
    end = End(found.append)
    for number in range(100):
        end.other.send([number])
    end.other.close()
    assert end.has_ended.wait(WAIT) and found == list(range(100)) and end.ends == [None]


@pytest.mark.parametrize("error", [KeyError("planted"), OSError("planted"), SystemExit("planted")], ids=repr)
def test_a_message_that_fails_ends_it(error: BaseException, said: list[str]) -> None:
    def fail(message: Any) -> None:
        raise error

    end = End(fail)
    end.other.send(["a message", "another one"])
    assert end.has_ended.wait(WAIT) and end.is_closed()
    assert end.ends == [error] and "planted" in said[0]


def test_a_message_that_cannot_be_sent_ends_it(said: list[str]) -> None:
    end = End(print)
    end.pipe.send("a message")
    assert end.other.recv() == ["a message"]
    end.pipe.send(threading.Lock())
    assert end.has_ended.wait(WAIT) and "cannot pickle" in said[0]
    end.other.close()
    end.pipe.close(WAIT)
    assert len(end.ends) == 1 and isinstance(end.ends[0], TypeError)
