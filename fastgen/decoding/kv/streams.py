"""K or V of several streams in a captured step: positions that they share, and further positions of each.

ProphetNet's streams read the K and V of the main stream, and each its own. The model concatenates the two once per
stream, which would copy all stored positions in every step. Here the products are computed on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.kv.view import METADATA, ONE_TENSOR, CannotBeCaptured, KVView


class StreamKVView(Tensor):
    """[rows, streams, heads, length + own length, dim]; heads may precede streams; one stream may lack that axis."""

    shared: KVView  # [rows, heads, length, dim]: shared by all streams
    own: list[Tensor]  # [rows, heads, own length, dim] of each stream, which follow the shared positions
    stream_dim: int | None  # the dimension of the streams, 1 or 2; None for one stream without that dimension

    @staticmethod
    def of(shared: KVView, own: Sequence[Tensor], stream_dim: int | None) -> StreamKVView:
        rows, heads, length, width = shared.shape
        shape = [rows, heads, length + own[0].shape[2], width]
        if stream_dim is not None:
            shape.insert(stream_dim, len(own))
        made = Tensor._make_wrapper_subclass(StreamKVView, shape, dtype=shared.dtype, device=shared.device)
        made.shared, made.own, made.stream_dim = shared, list(own), stream_dim
        return made

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        rule = _RULES.get(func)
        result = NotImplemented if rule is None or kwargs else rule(*args)
        if result is not NotImplemented:
            return result
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CannotBeCaptured(ONE_TENSOR)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise CannotBeCaptured(ONE_TENSOR)


def _join(streams: Any, stream_dim: int | None, dim: int) -> Any:
    """Stacks streams of the same K or V in dimension `dim`. Their present stream dimension is `stream_dim`."""
    first = streams[0]
    for part in streams:
        if not isinstance(part, StreamKVView) or part.shared is not first.shared or part.stream_dim != stream_dim:
            return NotImplemented
    own = [own for part in streams for own in part.own]
    return StreamKVView.of(first.shared, own, dim) if dim in (1, 2) else NotImplemented


def _transpose(streams: StreamKVView, first: int, second: int) -> Any:
    if streams.stream_dim is None or {first, second} != {1, 2}:
        return NotImplemented
    return StreamKVView.of(streams.shared, streams.own, 3 - streams.stream_dim)


def _einsum(equation: str, *operands: Any) -> Any:
    """An einsum that denotes scores of queries, or context of weights, [rows, streams, heads, queries, any]."""
    if len(operands) == 1:
        operands = tuple(operands[0])
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if len(operands) != 2 or not isinstance(operands[1], StreamKVView) or operands[1].stream_dim != 1:
        return NotImplemented
    if not len(left) == len(right) == len(output) == 5 or not left[:3] == right[:3] == output[:3]:
        return NotImplemented
    if len(set(left + right)) != 6 or left[3] != output[3]:
        return NotImplemented
    if left[4] == right[4] and output[4] == right[3]:
        return _scores(*operands)
    return _context(*operands) if left[4] == right[3] and output[4] == right[4] else NotImplemented


def _scores(query: Tensor, keys: StreamKVView) -> Tensor:
    """[rows, streams, heads, queries, dim] -> [rows, streams, heads, queries, length + own length]."""
    common = torch.matmul(_one_after_another(query), keys.shared.transpose(-1, -2))
    own = torch.matmul(query, torch.stack(keys.own, 1).transpose(-1, -2))
    return torch.cat([_apart(common, query), own], dim=-1)


def _context(weights: Tensor, values: StreamKVView) -> Tensor:
    """[rows, streams, heads, queries, length + own length] -> [rows, streams, heads, queries, dim]."""
    length = values.shared.shape[2]
    common = torch.matmul(_one_after_another(weights[..., :length]), values.shared)
    own = torch.matmul(weights[..., length:], torch.stack(values.own, 1))
    return _apart(common, weights) + own


def _one_after_another(streams: Tensor) -> Tensor:
    """[rows, streams, heads, queries, any] -> [rows, heads, streams * queries, any]."""
    return streams.transpose(1, 2).flatten(2, 3)


def _apart(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(2, (like.shape[1], like.shape[3])).transpose(1, 2)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.stack: lambda streams, dim=0: _join(streams, None, dim),
    torch.cat: lambda streams, dim=0: _join(streams, dim, dim),
    Tensor.unsqueeze: lambda stream, dim: _join([stream], None, dim),
    Tensor.transpose: _transpose,
    torch.einsum: _einsum,
}
