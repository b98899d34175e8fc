"""Loads FairSeq's checkpoints with a `torch.load` that runs no code from the file.

FairSeq calls `torch.load(file)`, which since torch 2.6 refuses everything but tensors and plain containers. The other
types in FairSeq's checkpoints are allowed while FairSeq reads one, and at no other time.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import enum
import functools
import importlib
import inspect
import os
import pickle
import re
import typing
from typing import Any

import numpy
import torch

from fastgen.interrupts import forkable_lock
from fastgen.optimizer.fairseq.compat.literals import RefusedValue

# The list of allowed types is global to the process: checkpoints are read one at a time.
_lock = forkable_lock()
_REFUSED = re.compile(r"GLOBAL (\S+)")
_BUILTINS = (bool, bytes, complex, dict, float, int, list, set, str, tuple)


def load(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of FairSeq's functions that read a checkpoint.

    Raises pickle.UnpicklingError, which names a damaged file, or a type that FairSeq's checkpoints do not contain.
    """
    with _lock:
        # Types that were allowed before stay allowed afterwards.
        added = set(_allowed()).difference(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals(list(added)):
            return _load(wrapped, args, kwargs)


def _load(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except (OSError, MemoryError, RefusedValue):
        raise
    except Exception as error:
        refused = _REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused is not None:
            name = refused.group(1)
            raise pickle.UnpicklingError(
                f"the checkpoint contains {name}, which is not among the types of a FairSeq checkpoint; reading it "
                f"could run code from the file. If you trust the file, import the type and call "
                f"torch.serialization.add_safe_globals([{name}]) first."
            ) from error
        if not args or not isinstance(args[0], str | os.PathLike):
            raise
        cause = type(error).__name__
        if "`weights_only`" not in str(error):  # torch would advise to read the file in a way that runs its code
            cause += "".join(f": {line}" for line in str(error).strip().splitlines()[:1])
        raise pickle.UnpicklingError(
            f"{os.fspath(args[0])} is damaged, or nothing that FairSeq has saved ({cause})"
        ) from error


@functools.cache
def _allowed() -> tuple[Any, ...]:
    """Returns the types, other than tensors, that FairSeq and its tasks write, under the names of all its releases."""
    allowed = [argparse.Namespace, collections.Counter, collections.defaultdict, codecs.encode, typing.Any, *_BUILTINS]
    return (*allowed, *_from_numpy(), *_from_omegaconf(), *_from_fairseq())


def _from_numpy() -> list[Any]:
    """Returns NumPy's scalars, as in losses and learning rates, and arrays. NumPy 2 has moved their constructors."""
    found: list[Any] = [numpy.dtype, numpy.ndarray, *_classes("numpy.dtypes")]
    for value in (numpy.float64(0), numpy.zeros(0)):
        function: Any = value.__reduce__()[0]
        found += [(function, f"{package}.multiarray.{function.__name__}") for package in ("numpy.core", "numpy._core")]
    return found


def _from_omegaconf() -> list[Any]:
    """Returns OmegaConf's containers, nodes and metadata."""
    found = [value for name in ("base", "nodes", "dictconfig", "listconfig") for value in _classes(f"omegaconf.{name}")]
    return [value for value in found if value.__module__.startswith("omegaconf.")]


def _from_fairseq() -> list[Any]:
    """Returns meters, choices and dictionaries. Older releases had the meters in another module."""
    found: list[Any] = [importlib.import_module("fairseq.data.dictionary").Dictionary]
    found += [value for value in _classes("fairseq.dataclass.constants") if issubclass(value, enum.Enum)]
    for value in _classes("fairseq.logging.meters"):
        if value.__module__ == "fairseq.logging.meters":
            found += [value, (value, f"fairseq.meters.{value.__name__}")]
    return found


def _classes(module: str) -> list[type]:
    return [value for value in vars(importlib.import_module(module)).values() if inspect.isclass(value)]
