"""Fixes of FairSeq 0.12, each around the faulty function or module.

Some faults come with current releases of Python, torch and NumPy; others let a data file decide what runs or is
written. FairSeq calls `torch.load(file)`, which since torch 2.6 refuses everything but tensors and plain containers.
The other types in FairSeq's checkpoints are allowed while FairSeq reads one, and at no other time.
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
import struct
import tarfile
import typing
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import wrapt

from fastgen.interrupts import forkable_lock
from fastgen.optimizer.fairseq.compat.literals import RefusedValue


def open_data(wrapped: Any, data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `MMapIndexedDataset._do_init(path)`.

    Raises:
        ValueError: the files are damaged or do not belong together. FairSeq's own errors do not say so
            (`KeyError: 101`), and it does not notice an index that points beyond the data.
    """
    path = args[0] if args else kwargs["path"]
    try:
        wrapped(*args, **kwargs)
        index = data._index
        ends = index._pointers + index.sizes.astype(numpy.int64) * index._dtype_size
        if len(ends) and (min(index.sizes.min(), index._pointers.min()) < 0 or ends.max() > len(data._bin_buffer)):
            raise ValueError("the index points beyond the data")
    except (AssertionError, KeyError, ValueError, OverflowError, struct.error) as error:
        raise ValueError(f"{path}.idx or {path}.bin is damaged, empty, or not written by fairseq-preprocess") from error


def load_from_state_dict(wrapped: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `TransformerEncoderLayerBase._load_from_state_dict`: keeps the layer on its own code.

    FairSeq would switch to torch's fused layer, in a way that current releases refuse for sources with padding.
    """
    wrapped(*args, **kwargs)
    layer.load_to_BT = False


def keep_arguments(wrapped: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `TranslationFromPretrainedBARTTask.__init__`: also stores the options in `args`, which its methods
    read.

    Without this no fine-tuned mBART can generate (FairSeq's issues 3169 and 4479).
    """
    wrapped(*args, **kwargs)
    if not hasattr(task, "args"):
        task.args = task.cfg


def fasta_index(wrapped: Any, dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Wrapper of `FastaDataset._build_index(path)`, which inserts the name of a data file into a shell command.

    Returns the byte offset and the length of each sequence, both int64 [sequences].
    """
    offsets, sizes = [], []
    with open(dataset.fn, "rb") as file:
        start = 0
        for line in file:
            if line.startswith(b">"):
                offsets.append(start)
                sizes.append(0)
            elif sizes:
                sizes[-1] += len(line.strip())
            start += len(line)
    return numpy.array(offsets, dtype=numpy.int64), numpy.array(sizes, dtype=numpy.int64)


class AskingTorch(wrapt.ObjectProxy):
    """torch for FairSeq's speech translation, which takes the name of a repository from a data directory.

    `hub.load` asks the user before it runs the code of an untrusted repository.
    """

    @property
    def hub(self) -> SimpleNamespace:
        return SimpleNamespace(load=functools.partial(torch.hub.load, trust_repo="check"))


class CarefulTarfile(wrapt.ObjectProxy):
    """tarfile for FairSeq's model archives: an opened archive extracts nothing outside of the given directory."""

    def open(self, *args: Any, **kwargs: Any) -> tarfile.TarFile:
        archive = tarfile.open(*args, **kwargs)  # noqa: SIM115 (its user closes it)
        archive.extraction_filter = tarfile.data_filter
        return archive


class OldNumpy(wrapt.ObjectProxy):
    """NumPy with the names of functions and arguments from FairSeq's time."""

    int = int
    float = float
    compat = SimpleNamespace(long=int)

    def percentile(self, a: Any, q: Any, *, interpolation: str = "linear") -> Any:
        return self.__wrapped__.percentile(a, q, method=interpolation)


# ---- checkpoints: read by a `torch.load` that runs no code from the file

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
