"""The threads of OpenMP, which torch's operators and the compiled ones share their work out to outside of programs.

Each thread that calls operators gets a team of its own, which it keeps. GNU's OpenMP counts the threads of all teams:
with more of them than there are cores, they sleep between two operators in place of waiting for the next one, and a
product of a few rows takes two to three times as long. So a thread that leaves the work to another one ends its team.
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
    """Ends the team of the calling thread, which gets a new one with an operator that is worth several threads.

    Nothing happens inside of such an operator, in a forked process, which has a team's books without its threads, nor
    with another OpenMP than GNU's.
    """
    pause = None if _is_forked else _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the OpenMP that torch has loaded; None for others than GNU's, and without one."""
    try:
        loaded = ctypes.CDLL(torch._C.__file__)  # a name is looked for in what that needs, too
    except OSError:
        return None
    if hasattr(loaded, "__kmpc_fork_call"):  # LLVM's and Intel's, which have GNU's names as well
        return None
    return getattr(loaded, "omp_pause_resource_all", None)


def _forked() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
