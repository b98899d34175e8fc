"""Time that a workload may take. When it is spent, one backend loses its run and the others keep theirs."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Alarm(BaseException):
    """Raised in the middle of whatever runs. No `Exception`, which FastGen and torch's compiler would recover from."""


class Budget:
    """Seconds from now on.

    Args:
        seconds: None for as long as it takes.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; never below 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.left == 0.0

    @contextmanager
    def limit(self, what: str) -> Iterator[None]:
        """Ends the block when the time is spent. It does so between two lines of Python, in the main thread alone.

        Blocks may be nested: the one that ends first ends what is inside of it.

        Raises:
            TimeoutError: `what` was not done by then.
        """
        seconds = self.left
        if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
            yield
            return
        if seconds == 0.0:
            raise TimeoutError(f"no time was left for {what}")

        def ring(*unused: Any) -> None:
            raise _Alarm

        start = time.monotonic()
        outer, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, min(seconds, outer or seconds))
        try:
            yield
        except _Alarm:
            raise TimeoutError(f"{what} took longer than the {seconds:.0f} s that were left") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if outer:
                signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), 1e-3))


UNLIMITED = Budget()
