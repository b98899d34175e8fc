"""Progress of a run: a bar on a terminal, otherwise a line every 30 seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

SECONDS_BETWEEN_LINES = 30.0


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class Progress:
    """Counts samples and tokens. Shows their rates and the time left, on standard error."""

    def __init__(self, total: int | None, already: int = 0, quiet: bool = False) -> None:
        self._total = total
        self._already = already
        self._samples = 0
        self._tokens = 0
        self._start = self._last_line = time.perf_counter()
        self._lines = False
        self._bar: Any = None
        if quiet:
            return
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=already, unit=" samples", dynamic_ncols=True, smoothing=0.1)
        else:
            self._lines = True

    def add(self, samples: int, tokens: int) -> None:
        """Add finished samples and their generated tokens."""
        self._samples += samples
        self._tokens += tokens
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        rate = f"{self._tokens / seconds:.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(rate, refresh=False)
            self._bar.update(samples)
        elif self._lines and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            done = self._already + self._samples
            of, left = "", ""
            if self._total:
                of = f" of {self._total}"
                remaining = (self._total - done) * seconds / max(self._samples, 1)
                left = f", {duration(remaining)} left"
            print(f"{done}{of} samples, {self._samples / seconds:.1f} samples/s, {rate}{left}", file=sys.stderr)

    def close(self) -> None:
        """End the bar. It stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
