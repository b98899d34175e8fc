"""Progress of a run: a bar on a terminal, otherwise a line every 30 seconds."""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts samples and tokens. Shows their rates and the time left, on standard error."""

    def __init__(self, total: int | None, already: int = 0, quiet: bool = False) -> None:
        from tqdm import tqdm

        self._total, self._already, self._done, self._tokens = total, already, already, 0
        self._start = self._last_line = time.perf_counter()
        self._lines = not (quiet or sys.stderr.isatty())
        hidden = quiet or self._lines
        options = {"unit": " samples", "dynamic_ncols": True, "smoothing": 0.1}
        self._bar = tqdm(total=total, initial=already, disable=hidden, **options)

    def add(self, samples: int, tokens: int) -> None:
        """Add finished samples and their generated tokens."""
        self._done += samples
        self._tokens += tokens
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        rate = f"{self._tokens / seconds:.0f} tokens/s"
        self._bar.set_postfix_str(rate, refresh=False)
        self._bar.update(samples)
        if self._lines and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            counts = {"n": self._done, "total": self._total, "initial": self._already}
            line = self._bar.format_meter(**counts, elapsed=seconds, ncols=0, unit=" samples", postfix=rate)
            print(line.strip(), file=sys.stderr)

    def close(self) -> None:
        """End the bar. It stays on the screen."""
        self._bar.close()
