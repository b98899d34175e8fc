"""The hooks around the reading of GGUF files: one line for a damaged file, less time and memory for the others."""

from __future__ import annotations

import functools
import inspect
import struct
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from fastgen import patching, settings
from fastgen.quantization.checkpoint import ADVICE

# Whether the model that is loaded keeps the blocks of its file.
keeping: ContextVar[bool] = ContextVar("fastgen_keeps_blocks", default=False)
# While a GGUF file is read into a model: the names of tensors in such files, by architecture and number of layers.
_name_maps: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("fastgen_gguf_names", default=None)


def reading_gguf() -> AbstractContextManager[None]:
    """Inside this block `name_map` makes each map once."""
    return patching.held(_name_maps, {})


def gguf_reader(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `GGUFReader.__init__`: a reader of the library's, or of FastGen's, becomes a plain one (`_plain_reader`).

    Those of other users of the package gguf stay as they are. Raises as `read_gguf` does.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")  # behind what stands for the constructor
    if not patching.is_active() or caller.partition(".")[0] not in ("transformers", "fastgen"):
        return wrapped(*args, **kwargs)
    plain = _plain_reader()
    if type(instance) is plain.__base__:
        instance.__class__ = plain
    return read_gguf(wrapped, instance, args, kwargs)


@functools.cache
def _plain_reader() -> type[Any]:
    """A reader whose parts are plain arrays. As slices of a memory map, each of them has a dictionary of its own.

    A vocabulary has three parts for each token: with 49,152 tokens the header takes 70 MiB in place of 157 while it is
    read, and a third of the time.
    """
    import gguf
    import numpy

    class PlainReader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, numpy.asarray(value) if name == "data" else value)

    return PlainReader


def name_map(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `gguf.get_tensor_name_map`, which the library asks anew for every module of a model."""
    made = _name_maps.get()
    if made is None:
        return wrapped(*args, **kwargs)
    key = tuple(inspect.signature(wrapped).bind(*args, **kwargs).arguments.values())
    if key not in made:
        made[key] = wrapped(*args, **kwargs)
    return made[key]


def read_gguf(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around what reads the header of a GGUF file, and trips over a damaged one wherever that is.

    It raises ValueError, on one line with the name of the file. Where nobody has asked for bits that are kept, the
    library's own errors stay.
    """
    try:
        return wrapped(*args, **kwargs)
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        path = str(next(iter(inspect.signature(wrapped).bind(*args, **kwargs).arguments.values())))
        said = " ".join(str(error).split())
        if not patching.is_active() or not (keeping.get() or settings.current().keep_bits) or path in said:
            raise
        raise ValueError(f"{path} cannot be read ({said}): {ADVICE}") from error
