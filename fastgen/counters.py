"""Counts what was accelerated, what fell back, and why: the data of `fastgen.stats()`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastgen import interrupts, settings
from fastgen.interrupts import forkable_lock

# Entry points of calls of `generate`, of their captured steps, of speculative decoding, of FairSeq, and of encoders.
GENERATE = "transformers.generate"
CAPTURED_STEP = "transformers.captured_step"
DRAFTS = "transformers.speculation"
OF_FAIRSEQ = "fairseq.generate"
ENCODER = "transformers.encoder"

# Reason why a call has no captured step although a later call like it will have one.
NOT_YET = "too few steps so far to pay for recording one, on the CPU"

Value = TypeVar("Value")
_PACKAGE = __file__.rpartition("counters")[0]


class FallbackError(RuntimeError):
    """Raised instead of falling back to the original code if FASTGEN_STRICT=1 or `enable(strict=True)` is set."""


_lock = forkable_lock()
# By entry point, outcome ("accelerated", "fallback" or "not used"), and reason.
_counts: Counter[tuple[str, str, str]] = Counter()
# Further sums over the calls of an entry point, by name.
_sums: Counter[tuple[str, str]] = Counter()


def _count(entry_point: str, outcome: str, reason: str = "") -> None:
    with _lock:
        _counts[entry_point, outcome, reason] += 1


def count_accelerated(entry_point: str) -> None:
    """Counts an accelerated call of `entry_point`."""
    _count(entry_point, "accelerated")


def count_fallback(entry_point: str, reason: str) -> None:
    """Counts a call of `entry_point` that falls back to the original code. Raises FallbackError in strict mode."""
    _count(entry_point, "fallback", reason)
    if settings.current().strict:
        raise FallbackError(f"{entry_point} would fall back to the original code: {reason}")


def count_not_used(entry_point: str, reason: str) -> None:
    """Counts a call that does without `entry_point`. That is no fallback: the call is accelerated anyway."""
    _count(entry_point, "not used", reason)


def add(entry_point: str, **amounts: int) -> None:
    """Adds to named sums over the calls of `entry_point`."""
    with _lock:
        for name, amount in amounts.items():
            _sums[entry_point, name] += amount


def count_failure(entry_point: str, failure: Exception) -> None:
    """Counts an accelerated call that ended in `failure` and falls back to the original code, and warns of it.

    The warning points to the code that called FastGen. Raises FallbackError in strict mode.
    """
    reason = f"{type(failure).__name__} in the accelerated call: {failure}"
    try:
        count_fallback(entry_point, reason)
    except FallbackError as strict:
        raise strict from failure
    warnings.warn(
        f"FastGen: {reason}. The original code takes the call over; please report this.",
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )


def decided(
    entry_point: str, decide: Callable[..., Value], *arguments: Any, foreseen: tuple[type[Exception], ...] = ()
) -> Value | None:
    """Returns `decide(*arguments)`, which examines a call before anything is changed; None if it raises.

    The call then falls back to the original code: a failure is counted and warned of, and raises FallbackError in
    strict mode. `foreseen` exceptions are raised. `decide` must not call code that is not FastGen's own.
    """
    try:
        return decide(*arguments)
    except Exception as failure:
        if isinstance(failure, (FallbackError, *foreseen)):
            raise
        interrupts.pass_on(failure)
        count_failure(entry_point, failure)
        return None


def level_of_caller(libraries: tuple[str, ...] = ()) -> int:
    """Returns the `stacklevel` of the first frame outside this package, for a warning in the calling function.

    Skips modules whose names begin with one of `libraries`, too, and what context managers add as decorators.
    """
    frame, level, libraries = sys._getframe(1), 1, (*libraries, "contextlib")
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_globals.get("__name__", "").startswith(libraries)
    ):
        frame, level = frame.f_back, level + 1
    return level


# Names of counts in earlier releases.
_FORMER_NAMES = {"checks": "verifies", "weights read in fewer bits": "weights read in 16 bits"}


class _Counts(dict[str, Any]):
    """A dict that also answers to former names, with a DeprecationWarning."""

    def __missing__(self, name: str) -> Any:
        new = _FORMER_NAMES.get(name)
        if new is None or new not in self:
            raise KeyError(name)
        warnings.warn(f"{name!r} is now called {new!r}", DeprecationWarning, stacklevel=level_of_caller())
        return self[new]

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`."""
        return self[name] if name in self or _FORMER_NAMES.get(name) in self else default


class Stats(_Counts):
    """Counts by entry point. A dict; prints as a table with a line for each reason."""

    def __str__(self) -> str:
        if not self:
            return "no call so far"
        rows: list[tuple[str, ...]] = [("", "accelerated", "fallback", "not used")]
        for name, entry in self.items():
            others = {what: entry.get(what, {}) for what in ("fallback", "not used")}
            totals = (sum(reasons.values()) for reasons in others.values())
            rows.append((name, *(str(calls or "-") for calls in (entry["accelerated"], *totals))))
            for column, reasons in enumerate(others.values(), 2):
                for reason, calls in reasons.items():
                    cells = ["", "", "", ""]
                    cells[0], cells[column] = f"  {reason}", str(calls)
                    rows.append(tuple(cells))
            sums = [f"{what} {amount}" for what, amount in entry.items() if isinstance(amount, int)][1:]
            if sums:
                rows.append((f"  {', '.join(sums)}", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        return "\n".join(lines)


def snapshot() -> Stats:
    """Returns the counts since the start or the last reset, as `fastgen.stats()` does."""
    found = Stats()
    with _lock:
        for (name, outcome, reason), calls in sorted(_counts.items()):
            entry = found.setdefault(name, _new_entry())
            if outcome == "accelerated":
                entry[outcome] = calls
            else:
                entry.setdefault(outcome, {})[reason] = calls
        for (name, what), amount in sorted(_sums.items()):
            found.setdefault(name, _new_entry())[what] = amount
    return found


def _new_entry() -> _Counts:
    return _Counts(accelerated=0, fallback={})


def merge(stats: Mapping[str, Any]) -> None:
    """Adds another process's counts, given as its snapshot."""
    with _lock:
        for name, entry in stats.items():
            for what, found in entry.items():
                if what == "accelerated":
                    _counts[name, what, ""] += found
                elif isinstance(found, Mapping):
                    _counts.update({(name, what, reason): calls for reason, calls in found.items()})
                else:
                    _sums[name, what] += found


def reset() -> None:
    """Resets all counts to zero."""
    with _lock:
        _counts.clear()
        _sums.clear()


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """A context whose counts are discarded at its end."""
    with _lock:
        before = _counts.copy(), _sums.copy()
    try:
        yield
    finally:
        with _lock:
            reset()
            _counts.update(before[0])
            _sums.update(before[1])


@dataclass(frozen=True)
class Drafts:
    """Numbers of drafted and accepted tokens."""

    drafted: int
    accepted: int
    verifies: int
    """Forward passes that verified drafts."""

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Drafts | None:
        """Returns the difference of two snapshots; None if nothing was drafted in between."""
        old, new = (stats.get(DRAFTS, {}) for stats in (before, after))
        found = cls(*(new.get(name, 0) - old.get(name, 0) for name in ("drafted", "accepted", "verifies")))
        return found if found.drafted else None

    def __str__(self) -> str:
        share, each = f"{100 * self.accepted / self.drafted:.1f} %", f"{self.accepted / self.verifies:.2f}"
        return f"{self.drafted} tokens drafted, {share} of them accepted, {each} in each of {self.verifies} verifies"


@dataclass(frozen=True)
class Outcome:
    """The outcome of calls: how many were accelerated, and why the others were not. `str` gives one line."""

    accelerated: int
    captured: int
    """How many of these had a captured step."""
    reasons: Mapping[str, int]
    """Why the other calls were not accelerated, with the number of calls."""

    @classmethod
    def of(cls, stats: Mapping[str, Any], entry_point: str) -> Outcome:
        """Returns the outcome, in a snapshot, of an entry point and its parts, which have a suffix after a comma."""
        accelerated, reasons = 0, Counter[str]()
        for name, entry in stats.items():
            if name.partition(",")[0] == entry_point:
                accelerated += entry["accelerated"]
                reasons.update(entry["fallback"])
                reasons.update(entry.get("not used", {}))
        captured = stats.get(CAPTURED_STEP, {}).get("accelerated", 0) if entry_point == GENERATE else 0
        return cls(accelerated, captured, reasons)

    def __str__(self) -> str:
        others = sum(self.reasons.values())
        calls = self.accelerated + others
        ranked = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        if not self.accelerated:
            why = [reason if len(ranked) == 1 else f"{reason} ({_calls(count)})" for reason, count in ranked]
            return f"not accelerated: {'; '.join(why)}"
        captured = f", {self.captured} with captured steps" if self.captured else ""
        if not others:
            return f"accelerated by FastGen: {'all ' if calls > 1 else ''}{_calls(calls)}{captured}"
        why = [f"{reason} ({_calls(count)})" for reason, count in ranked]
        return f"accelerated by FastGen: {self.accelerated} of {calls} calls{captured}; the others: {'; '.join(why)}"


def _calls(count: int) -> str:
    return f"{count} call{'s' if count != 1 else ''}"
