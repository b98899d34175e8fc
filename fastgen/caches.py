"""What FastGen keeps from one call to the next: who keeps something registers here how to free it."""

from __future__ import annotations

from collections.abc import Callable

_everywhere: list[Callable[[], object]] = []
_captured_steps: list[Callable[[], bool]] = []


def register(free: Callable[[], object]) -> None:
    """`free` is called when FastGen is disabled."""
    _everywhere.append(free)


def register_captured_steps(free: Callable[[], bool]) -> None:
    """`free` is also called when a device runs out of memory; it says whether there was anything."""
    _captured_steps.append(free)


def free_all() -> None:
    """Frees everything that no running call uses."""
    for free in (*_everywhere, *_captured_steps):
        free()


def free_captured_steps() -> bool:
    """Frees the captured steps that no running call uses; says whether there were any."""
    return any([free() for free in _captured_steps])
