"""Small faults of FairSeq 0.12 on current releases of torch and Python, each mended around the function that has it."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy


def close(wrapped: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `MMapIndexedDataset.__del__` and of that of its index.

    Both close the file that they have mapped. If opening failed there is nothing to close, and Python would print a
    second error after the one that matters.
    """
    with contextlib.suppress(AttributeError):
        wrapped(*args, **kwargs)


def open_data(wrapped: Any, data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `MMapIndexedDataset._do_init(path)`.

    Raises:
        ValueError: the files are damaged or do not belong together. FairSeq's own errors do not say so
            (`KeyError: 101`), and it does not notice an index that points to places which the data do not have.
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
    """Wrapper of `TransformerEncoderLayerBase._load_from_state_dict`.

    A layer that has loaded its weights switches to torch's fused encoder layer. Current releases of torch refuse the
    way in which it is called when the source has padding. The layer's own code computes the same.
    """
    wrapped(*args, **kwargs)
    layer.load_to_BT = False


def keep_arguments(wrapped: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `TranslationFromPretrainedBARTTask.__init__`.

    Its methods read the task's options from `args`, where older releases kept them. Without this no fine-tuned mBART
    can generate (FairSeq's issues 3169 and 4479).
    """
    wrapped(*args, **kwargs)
    if not hasattr(task, "args"):
        task.args = task.cfg
