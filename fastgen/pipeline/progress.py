"""Shows the progress of a run on standard error: a bar on a terminal, otherwise a line a minute; if quiet, nothing."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

SECONDS_BETWEEN_LINES = 60.0
_SECONDS_BETWEEN_REFRESHES = 0.1


class Progress:
    """Counts finished items, and shows a rate given by the caller.

    Args:
        unit: what is counted, in the plural.
        total: the total number; None if unknown.
        already: how many were done before. They took no time, so the estimate of the remaining time ignores them.
    """

    def __init__(self, unit: str, total: int | None, already: int = 0, quiet: bool = False) -> None:
        self._unit, self._total, self._already, self._done = unit, total, already, already
        self._start = self._last = time.monotonic()
        shows = not quiet and sys.stderr is not None
        on_terminal = shows and sys.stderr.isatty()
        self._lines = shows and not on_terminal
        self._bar = _bar(unit, total, already) if on_terminal else None
        self._shared = threading.Lock()

    def add(self, count: int = 1, rate: str = "") -> None:
        """Adds finished items. Any thread may call it."""
        with self._shared:
            self._done += count
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done, rate=rate)
                if now - self._last >= _SECONDS_BETWEEN_REFRESHES:
                    self._last = now
                    self._bar.refresh()
            elif self._lines and now - self._last >= SECONDS_BETWEEN_LINES:
                self._last = now
                print(self._line(now - self._start, rate), file=sys.stderr)

    def close(self) -> None:
        """Stops the bar, which stays visible."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, seconds: float, rate: str) -> str:
        parts = [f"{self._done:,} {self._unit}"]
        if self._total is not None:
            parts[0] = f"{self._done:,} of {self._total:,} {self._unit} ({self._done / max(self._total, 1):.0%})"
        parts.append(f"{_duration(seconds)} so far")
        new = self._done - self._already
        if self._total is not None and new > 0:
            parts.append(f"about {_duration(seconds / new * (self._total - self._done))} left")
        return ", ".join([*parts, *filter(None, [rate])])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _bar(unit: str, total: int | None, already: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"), TimeElapsedColumn())
    more = (TextColumn("left"), TimeRemainingColumn(compact=True), TextColumn("{task.fields[rate]}"))
    # Without a thread that draws, because processes are forked during a run.
    console = Console(stderr=True)
    # The user's own output is not redirected.
    bar = Bar(*columns, *more, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", total=total, completed=already, unit=unit, rate="")
    bar.start()
    return bar
