"""Hooks around reading GGUF files: a one-line error for damaged files, and less time and memory for valid ones."""

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

# Whether the model being loaded keeps the blocks of its file.
keeping: ContextVar[bool] = ContextVar("fastgen_keeps_blocks", default=False)
# While a GGUF file is loaded: cached maps of tensor names, by architecture and number of layers.
_name_maps: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("fastgen_gguf_names", default=None)


def reading_gguf() -> AbstractContextManager[None]:
    """A context in which `name_map` builds each map once."""
    return patching.held(_name_maps, {})


def gguf_reader(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GGUFReader.__init__`: turns a reader made by the library or by FastGen into a plain one (`_plain_reader`).

    Readers of other users of the package gguf are not changed. Raises the same errors as `read_gguf`.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")  # skips the constructor's wrapper
    if not patching.is_active() or caller.partition(".")[0] not in ("transformers", "fastgen"):
        return wrapped(*args, **kwargs)
    plain = _plain_reader()
    if type(instance) is plain.__base__:
        instance.__class__ = plain
    return read_gguf(wrapped, instance, args, kwargs)


@functools.cache
def _plain_reader() -> type[Any]:
    """Returns a reader class whose parts are plain arrays. Slices of a memory map would each have a dictionary.

    A vocabulary has three parts for each token: with 49,152 tokens, reading the header takes 70 MiB instead of 157, and
    a third of the time.
    """
    import gguf
    import numpy

    class PlainReader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, numpy.asarray(value) if name == "data" else value)

    return PlainReader


def name_map(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `gguf.get_tensor_name_map`, which the library calls again for every module of a model."""
    made = _name_maps.get()
    if made is None:
        return wrapped(*args, **kwargs)
    key = tuple(inspect.signature(wrapped).bind(*args, **kwargs).arguments.values())
    if key not in made:
        made[key] = wrapped(*args, **kwargs)
    return made[key]


def read_gguf(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps the functions that read the header of a GGUF file, which fail anywhere on a damaged one.

    Raises ValueError, in one line with the file's name. If nobody has asked to keep bits, the library's own errors are
    raised.
    """
    try:
        return wrapped(*args, **kwargs)
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        path = str(next(iter(inspect.signature(wrapped).bind(*args, **kwargs).arguments.values())))
        said = " ".join(str(error).split())
        if not patching.is_active() or not (keeping.get() or settings.current().keep_bits) or path in said:
            raise
        raise ValueError(f"{path} cannot be read ({said}): {ADVICE}") from error
