"""Counts of what was accelerated and what fell back, and why: the numbers behind `fastgen.stats()`."""

from __future__ import annotations

import threading
import warnings
from collections import Counter

from fastgen import settings


class FallbackError(RuntimeError):
    """Raised instead of falling back to the original code when FASTGEN_STRICT=1 or `enable(strict=True)` is set."""


_lock = threading.Lock()
_accelerated: Counter[str] = Counter()
_fallbacks: dict[str, Counter[str]] = {}
_not_used: dict[str, Counter[str]] = {}


def count_accelerated(entry_point: str) -> None:
    """One call of `entry_point` ran accelerated."""
    with _lock:
        _accelerated[entry_point] += 1


def count_fallback(entry_point: str, reason: str) -> None:
    """One call of `entry_point` goes to the original code because of `reason`.

    Raises:
        FallbackError: in strict mode, so that a test or a user can tell acceleration from fallback.
    """
    with _lock:
        _fallbacks.setdefault(entry_point, Counter())[reason] += 1
    if settings.current().strict:
        raise FallbackError(f"{entry_point} would fall back to the original code: {reason}")


def count_not_used(entry_point: str, reason: str) -> None:
    """One call does without `entry_point` because of `reason`. That is no fallback: the call is accelerated anyway."""
    with _lock:
        _not_used.setdefault(entry_point, Counter())[reason] += 1


def count_failure(entry_point: str, failure: Exception, stacklevel: int) -> None:
    """An accelerated call of `entry_point` ended in `failure` and was repeated with the original code; warns of it.

    Args:
        stacklevel: of the warning, as `warnings.warn` in the calling function would take it.

    Raises:
        FallbackError: in strict mode, from `failure`.
    """
    reason = f"{type(failure).__name__} in the accelerated call: {failure}"
    try:
        count_fallback(entry_point, reason)
    except FallbackError as strict:
        raise strict from failure
    warnings.warn(
        f"FastGen: {reason}. The call was repeated with the original code; please report this.",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


def snapshot() -> dict[str, dict[str, int | dict[str, int]]]:
    """The counts since the start or the last reset, as `fastgen.stats()` returns them."""
    with _lock:
        found: dict[str, dict[str, int | dict[str, int]]] = {
            name: {"accelerated": _accelerated[name], "fallback": dict(_fallbacks.get(name, {}))}
            for name in sorted({*_accelerated, *_fallbacks, *_not_used})
        }
        for name, reasons in _not_used.items():
            found[name]["not used"] = dict(reasons)
        return found


def reset() -> None:
    """Sets every count to zero."""
    with _lock:
        _accelerated.clear()
        _fallbacks.clear()
        _not_used.clear()
