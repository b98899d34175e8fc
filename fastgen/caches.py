"""What FastGen keeps from one call to the next: who keeps something registers here how to free it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# So many things are remembered of a model besides what is kept.
MOST_REMEMBERED = 1000
_registered: dict[Callable[[], object], bool] = {}  # and whether it frees captured steps


def register(free: Callable[[], object], captured_steps: bool = False) -> None:
    """`free` is called when FastGen is disabled; that of captured steps, which says whether there were any, also when
    a device runs out of memory."""
    _registered[free] = captured_steps


def limit(*remembered: dict[Any, Any] | set[Any]) -> None:
    """Forgets what has grown too long: calls with ever other options must not fill the memory."""
    for each in remembered:
        if len(each) > MOST_REMEMBERED:
            each.clear()


def free_all() -> None:
    """Frees everything that no running call uses."""
    for free in _registered:
        free()


def free_captured_steps() -> bool:
    """Frees the captured steps that no running call uses; says whether there were any."""
    return any([free() for free, captured_steps in _registered.items() if captured_steps])
