"""OpenMP's threads, which run torch's operators and FastGen's compiled ones outside captured programs.

Each thread that calls operators gets a team of its own, and keeps it. GNU's OpenMP counts the threads of all teams: if
there are more of them than cores, they sleep between two operators instead of spinning, and a linear op of a few rows
takes two to three times as long. So a thread that leaves the work to another one ends its team.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch

_is_forked = False
# omp_pause_soft, of omp_pause_resource_t (OpenMP 5.0, section 3.2.43).
_SOFT = 1


def end_team() -> None:
    """Ends the calling thread's team. The thread gets a new team with its next multi-threaded operator.

    Does nothing inside such an operator, in a forked process (which has the team's records without its threads), or
    with an OpenMP other than GNU's.
    """
    pause = None if _is_forked else _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Returns `omp_pause_resource_all` of torch's OpenMP; None without OpenMP, or if it is not GNU's."""
    try:
        loaded = ctypes.CDLL(torch._C.__file__)  # symbols are also looked up in its dependencies
    except OSError:
        return None
    if hasattr(loaded, "__kmpc_fork_call"):  # LLVM's and Intel's, which also export GNU's names
        return None
    return getattr(loaded, "omp_pause_resource_all", None)


def _forked() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
