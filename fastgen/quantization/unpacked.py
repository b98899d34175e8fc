"""The weight of a layer in floating point, for code that reads weights: unpacked by the first operation that reads it.

It is a tensor whose shape, type and device are known. It cannot be written to: it is a copy, so a write would be lost
silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Advice for code that writes to such a weight.
UNPACK = "call model.dequantize() first, which unpacks them"
# Views that do not read it.
_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Unpacked(Tensor):
    """A weight, or a view of one. Use `of` to make one.

    A weight counts as a parameter, like that of an ordinary layer. `owner` is its layer; a view has none.
    """

    _unpacked_once: Callable[[], Tensor]  # computed once
    owner: Any

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device, owner: Any, compute: Callable[[], Tensor]
    ) -> Unpacked:
        """Returns a tensor that `compute` returns when needed: contiguous, of this shape and type, on this device."""
        found = Tensor._make_wrapper_subclass(Unpacked, torch.Size(shape), dtype=dtype, device=device)
        found._unpacked_once, found.owner = functools.cache(compute), owner
        found._is_param = True  # makes it an instance of torch.nn.Parameter
        return found

    @staticmethod
    def _view(like: Tensor, unpacked: Callable[[], Tensor]) -> Unpacked:
        found = Tensor._make_wrapper_subclass(
            Unpacked, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        found._unpacked_once, found.owner = unpacked, None
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handles functions that do not become an operator: they get the unpacked memory, or are refused."""
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, Unpacked):
            if func is _DATA.__get__:
                return args[0].detach()
            # It does not require gradients anyway.
            needs_none = func in _OF_GRADIENTS and not (*args[1:], *kwargs.values(), True)[0]
            if func in _WRITING and not needs_none:
                _refuse()
        if func in _OF_MEMORY:
            args, kwargs = tree_map(_unpacked, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            (weight,) = args
            return Unpacked._view(weight, weight._unpacked_once)
        arguments = {argument.name: argument for argument in func._schema.arguments}
        given = [*zip(arguments.values(), args, strict=False), *((arguments[name], kwargs[name]) for name in kwargs)]
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and any(isinstance(leaf, Unpacked) for leaf in tree_leaves(value)):
                _refuse()
        result = func(*tree_map(_unpacked, args), **tree_map(_unpacked, kwargs))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return tree_map(_view, result)  # writes to a view would be lost, too
        return result


def _refuse() -> None:
    raise RuntimeError(f"weights that are kept in their bits cannot be written to: {UNPACK}")


def _unpacked(leaf: Any) -> Any:
    return leaf._unpacked_once() if isinstance(leaf, Unpacked) else leaf


def _view(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, Unpacked):
        return leaf
    return Unpacked._view(leaf, lambda: leaf)


_DATA: Any = Tensor.data
_REQUIRES_GRAD: Any = Tensor.requires_grad
_OF_GRADIENTS: frozenset[Any] = frozenset({_REQUIRES_GRAD.__set__, Tensor.requires_grad_})
_WRITING = _OF_GRADIENTS | {Tensor.__setitem__, _DATA.__set__, Tensor.resize_, Tensor.set_}
_OF_MEMORY = frozenset(
    {
        Tensor.__array__,
        Tensor.__deepcopy__,
        Tensor.__dlpack__,
        Tensor.__format__,
        Tensor.__reduce_ex__,
        Tensor.__repr__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.share_memory_,
        Tensor.storage,
        Tensor.tolist,
        Tensor.untyped_storage,
    }
)
