"""Where FairSeq would let a file of data decide what runs or is written: names of files, archives, repositories."""

from __future__ import annotations

import tarfile
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import wrapt


def fasta_index(wrapped: Any, dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Wrapper of `FastaDataset._build_index(path)`, which puts the path into a command of the shell.

    A part of the path is the name that a file in the data directory has.

    Returns:
        The byte at which each sequence begins and how long it is, both int64 [sequences].
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


class _Torch(wrapt.ObjectProxy):
    """torch, but `hub.load` asks its user before it runs the code of a repository that is not trusted yet."""

    @property
    def hub(self) -> SimpleNamespace:
        return SimpleNamespace(load=_hub_load)


def _hub_load(repository: str, model: str, **options: Any) -> Any:
    return torch.hub.load(repository, model, **{"trust_repo": "check", **options})


def asking_torch(module: Any) -> Any:
    """torch for FairSeq's speech translation, which takes the name of a repository from a data directory."""
    return _Torch(module)


class _Tarfile(wrapt.ObjectProxy):
    """tarfile, but what `open` returns extracts nothing outside of the directory that it is given."""

    def open(self, *args: Any, **kwargs: Any) -> tarfile.TarFile:
        archive = tarfile.open(*args, **kwargs)  # noqa: SIM115 (its user closes it)
        archive.extraction_filter = tarfile.data_filter
        return archive


def careful_tarfile(module: Any) -> Any:
    """tarfile for FairSeq's archives of models."""
    return _Tarfile(module)
