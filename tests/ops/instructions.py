"""Choosing the instruction set of the compiled operators, which a process otherwise does once, and their threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.ops import _library
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa
from fastgen.ops.linear.kernels import BF16X3


def has_tiles() -> bool:
    """Whether the processor has AMX tiles, and the kernels may use them: the kernel itself knows."""
    x = torch.zeros(1, 1)
    try:
        BF16X3.out(torch.empty_like(x), x, x, None)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def instruction_set(name: str | None) -> Iterator[None]:
    """Inside, the kernels use these vectors at the most: "default", "avx2" or "avx512"; None: what they always use.

    "avx2" is without AVX-VNNI, "avx-vnni" with it, where the processor has it.
    """
    try:
        with pytest.MonkeyPatch.context() as patch:
            if name is not None:
                patch.setenv("ATEN_CPU_CAPABILITY", "avx2" if name == "avx-vnni" else name)
            _choose(name != "avx2")
            yield
    finally:
        _choose(True)


def each_set(*names: str | None) -> list[Any]:
    """Parameters of tests: these instruction sets. Those that would be another one of them again are skipped."""
    return [pytest.param(name, id=name or "widest", marks=unless_again(name, names)) for name in names]


def unless_again(name: str | None, names: Sequence[str | None]) -> pytest.MarkDecorator:
    """Skips a set that the processor lacks, where the next narrower one is used, and None where it is a named one."""
    widest, has_vnni = _of_the_processor()
    lacks = {"avx512": widest < Isa.AVX512, "avx-vnni": not has_vnni, "avx2": widest < Isa.AVX2}
    own = {Isa.PORTABLE: "default", Isa.AVX2: "avx-vnni" if has_vnni else "avx2", Isa.AVX512: "avx512"}.get(widest)
    is_again = own in names if name is None else lacks.get(name, False)
    return pytest.mark.skipif(is_again, reason="another instruction set again, on this processor")


@functools.cache
def _of_the_processor() -> tuple[Isa, bool]:
    """Its instruction set, whatever ATEN_CPU_CAPABILITY allows, and whether it has AVX-VNNI, if that is known."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("ATEN_CPU_CAPABILITY", raising=False)
            _choose(True)
            widest = Isa.PORTABLE if _library.load("CPU") else Isa(torch.ops.fastgen.instruction_set.default())
    finally:
        _choose(True)
    about = Path("/proc/cpuinfo")
    return widest, not about.exists() or "avx_vnni" in about.read_text()


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def zen5(is_so: bool) -> Iterator[None]:
    """Inside, the kernels do what they do on an AMD processor from Zen 5 on, or on others."""
    try:
        for library in _library_of_the_kernels():
            seen = library.fastgen_count_as_zen5(int(is_so))
            assert seen == is_so or platform.machine() not in ("x86_64", "AMD64")
        yield
    finally:
        for library in _library_of_the_kernels():
            library.fastgen_count_as_zen5(-1)


def _choose(with_avx_vnni: bool) -> None:
    for library in _library_of_the_kernels():
        library.fastgen_forget_instruction_set()
        library.fastgen_allow_avx_vnni(with_avx_vnni)


def _library_of_the_kernels() -> list[ctypes.CDLL]:
    """That of the compiled operators; an empty list where it was not built."""
    path = Path(_library.__file__).with_name("libfastgen_cpu.so")
    return [] if _library.load("CPU") else [ctypes.CDLL(str(path))]


def _lacks(isa: Isa, words: str) -> pytest.MarkDecorator:
    reason = _library.load("CPU") or f"needs {words}: this processor has none, or may not use it"
    return pytest.mark.skipif(choose.instruction_set() < isa, reason=reason)


needs_amx = _lacks(Isa.AMX, "AMX")
