"""The compiled operators: libraries that setup.py builds from csrc and puts beside this file, one per kind of device.

A library only adds kernels to operators that their modules in this package have defined. So an operator exists, and
works on its reference, whether or not a library could be built, and libraries do not depend on Python.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastgen import counters

_NAMES = {"CPU": "C++ (csrc)", "CUDA": "CUDA (csrc)"}


@functools.cache
def load(device: str) -> str:
    """Loads the kernels for `device` ("CPU" or "CUDA") unless they are loaded; returns why not, or an empty string.

    FASTGEN_NO_EXT=1 in the environment disables them.
    """
    if is_disabled():
        return "FASTGEN_NO_EXT is set"
    path = Path(__file__).with_name(f"libfastgen_{device.lower()}.so")
    if not path.exists():
        return _not_built(path.parents[2], device)
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        # The library was built for another torch or platform. The reference is slower but correct, so this must not
        # fail.
        what = str(error).strip().splitlines()[0]
        return f"{path.name} cannot be loaded, install FastGen again for this torch: {what}"
    return ""


def _not_built(folder: Path, device: str = "CPU") -> str:
    """Returns why there is no library. In a checkout, Python imports the package from there, whatever is installed."""
    reason = "the extension was not built"
    if (folder / "setup.py").exists():
        return f"{reason} in {folder}, from where fastgen is imported: run Python in another folder, or build it there"
    needed = "a C++ compiler" if device == "CPU" else "nvcc, and a torch for CUDA"
    return f"{reason}: install FastGen again where there is {needed}"


_has_warned = False


def warn_if_missing(device: torch.device) -> None:
    """Warns, once, that an accelerated call had no compiled operators, unless that was asked for.

    A call on a GPU does not need those for the CPU.
    """
    global _has_warned
    if _has_warned or device.type != "cpu" or is_disabled():
        return
    reason = load("CPU")
    if not reason:
        return
    _has_warned = True
    warnings.warn(
        f"FastGen runs without its compiled operators, and is several times slower on a CPU than with them: {reason}. "
        "FASTGEN_NO_EXT=1 says that this is wanted",
        RuntimeWarning,
        stacklevel=counters.level_of_caller(),
    )


def is_disabled() -> bool:
    """Whether FASTGEN_NO_EXT disables compiled operators."""
    return os.environ.get("FASTGEN_NO_EXT", "0") not in ("", "0")


def define(
    schema: str, reference: Callable[..., Any] | None = None, fake: Callable[..., Any] | None = None, **options: Any
) -> None:
    """Defines an operator, with its reference for devices without a kernel, and its shapes for `torch.compile`."""
    name = schema.partition("(")[0]
    if name in _FORMER:
        return
    _DEFINED.add(name)
    _OPERATORS.define(schema, **options)
    if "!" in schema and "!" not in schema.partition("->")[2]:
        for key in ("Negative", "Conjugate"):
            _OPERATORS.impl(name, functools.partial(_with_lazy_arguments, name), key)
    if reference is not None:
        _OPERATORS.impl(name, reference, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"fastgen::{name}", fake, lib=_OPERATORS)


def _with_lazy_arguments(name: str, *args: Any, **named: Any) -> Any:
    """Runs an operator on copies of views that negate or conjugate lazily; refuses to write to such views.

    torch's own fallback copies the result to the view that is written to. It does so even if the operator returns no
    result; it then reads, and releases, what was there before: a tensor in torch 2.15.
    """
    operator = getattr(torch.ops.fastgen, name).default
    for argument, arg in zip(operator._schema.arguments, args, strict=False):
        if argument.is_write and any(x.is_neg() or x.is_conj() for x in tree_leaves(arg) if isinstance(x, Tensor)):
            raise RuntimeError(f"{name}: {argument.name} is a view that negates or conjugates, which is not written to")
    resolved = tree_map_only(Tensor, lambda x: x.resolve_conj().resolve_neg(), (args, named))
    return operator(*resolved[0], **resolved[1])


_with_kernel: set[tuple[str, str]] = set()  # libraries are never unloaded


def has_kernel(operator: str, device: str = "CPU") -> bool:
    """Whether a library has a kernel of `operator` ("fastgen::name") for `device` ("CPU" or "CUDA")."""
    if (operator, device) in _with_kernel:
        return True
    there = torch._C._dispatch_has_kernel_for_dispatch_key(operator, device)
    if there:
        _with_kernel.add((operator, device))
    return there


def backend(operator: str) -> str:
    """Returns what serves `operator` ("fastgen::name"), according to torch's dispatcher, for each kind of device."""
    phrases = []
    for device in _devices():
        without = f"torch reference{'' if device == 'CPU' else f' on {device}'}: {load(device) or 'no kernel'}"
        there = has_kernel(operator, device)
        phrases.append(_NAMES[device] if there else without)
    return ", ".join(phrases)


def availability(operator: str) -> Callable[[], bool]:
    """Returns a function for an operator: whether it has a kernel for the CPU."""
    return functools.cache(functools.partial(has_kernel, operator))


def checks(operator: str, error: type[Exception]) -> Callable[[bool, str], None]:
    """Returns a function that raises `error`, with the operator's name and a message, unless a condition holds."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise error(f"{operator}: {message}")

    return require


def share_memory(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory: compares the ranges from the first to the last element of each."""
    if x.device.type not in ("cpu", "cuda") or x.device != other.device or not (x.numel() and other.numel()):
        return False
    (begin, end), (other_begin, other_end) = (_extent(each) for each in (x, other))
    return begin < other_end and other_begin < end


def is_in_storage(x: Tensor) -> bool:
    """Whether a tensor's storage is as large as its sizes and strides require."""
    return not x.numel() or (x.storage_offset() + _reach(x)) * x.element_size() <= x.untyped_storage().nbytes()


def _extent(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + _reach(x) * x.element_size()


def _reach(x: Tensor) -> int:
    """Returns the number of elements from the first to the last one of a tensor, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _devices() -> list[str]:
    return ["CPU"] if torch.version.cuda is None else ["CPU", "CUDA"]


# Operators belong to the process, and are defined once: even if these modules are removed and imported again. So their
# definitions are kept in torch's own namespace.
_KEPT = vars(torch.ops.fastgen).setdefault("_of_fastgen", (torch.library.Library("fastgen", "FRAGMENT"), set()))
_OPERATORS, _DEFINED = _KEPT
_FORMER = frozenset(_DEFINED)
for _device in _devices():
    load(_device)
