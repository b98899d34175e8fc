"""Fixes of FairSeq 0.12, each around the faulty function or module.

Some faults come with current releases of Python, torch and NumPy; others let a data file decide what runs or is
written.
"""

from __future__ import annotations

import functools
import struct
import tarfile
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import wrapt


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
