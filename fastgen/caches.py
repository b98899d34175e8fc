"""Registry of what FastGen keeps from one call to the next: each owner registers a function that frees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Limit of entries that are remembered of a model in addition to the caches.
MOST_REMEMBERED = 1000
_registered: dict[Callable[[], object], bool] = {}  # value: whether it frees captured steps


def register(free: Callable[[], object], captured_steps: bool = False) -> None:
    """Registers `free`, to be called when FastGen is disabled. With `captured_steps`, it is also called when a device
    runs out of memory, and must return whether it has freed any step.
    """
    _registered[free] = captured_steps


def limit(*remembered: dict[Any, Any] | set[Any]) -> None:
    """Clears collections that have grown too large: calls with ever new options must not fill the memory."""
    for each in remembered:
        if len(each) > MOST_REMEMBERED:
            each.clear()


def free_all() -> None:
    """Frees everything that no running call uses."""
    for free in _registered:
        free()


def free_captured_steps() -> bool:
    """Frees the captured steps that no running call uses, and returns whether there were any."""
    return any([free() for free, captured_steps in _registered.items() if captured_steps])
