"""A tensor that represents K or V of all rows without repeating the prefix in memory.

`KVView` has the shape, dtype and device of the full tensor, [rows, heads, length, dim]. The operations of attention are
computed on prefix and suffix; scaling, masks, biases and soft-caps stay the model's own code. Any other operation on a
`KVView` gets the full tensor, which is correct but slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastgen.decoding.kv.parts import Parts
from fastgen.ops.attention import pays, shared_prefix_attention, shared_prefix_context, shared_prefix_scores

# Passed through without building the full tensor, because they do not read its contents.
_ATTRIBUTES = "shape dtype device ndim requires_grad is_cuda is_cpu is_mps is_xpu is_quantized is_nested layout"
METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    }
)


class KVView(torch.Tensor):
    """K or V of all rows, stored as a prefix per input and a suffix per row. See the module's docstring.

    Valid until the store that made it changes, that is, within one forward pass.
    """

    _parts: Parts
    _full: Tensor | None

    @staticmethod
    def of(prefix: Tensor, suffix: Tensor | None, per_input: int, *rest: Any, **more: Any) -> KVView:
        """Returns the tensor [batch * per_input, kv heads, N + T, dim] of these `Parts`."""
        return KVView._make(Parts(prefix, suffix, per_input, *rest, **more))

    @staticmethod
    def _make(parts: Parts) -> KVView:
        prefix = parts.prefix
        made = Tensor._make_wrapper_subclass(KVView, parts.shape(), dtype=prefix.dtype, device=prefix.device)
        made._parts, made._full = parts, None
        return made

    @property
    def is_of_step(self) -> bool:
        """Whether it belongs to a captured step."""
        return self._parts.backend is not None

    def cut(self, at: int) -> tuple[KVView, KVView]:
        """Splits the last dimension into the first `at` columns and the rest."""
        first, rest = (replace(self._parts, columns=each) for each in (slice(at), slice(at, None)))
        return KVView._make(first), KVView._make(rest)

    def materialize(self) -> Tensor:
        """Returns the ordinary tensor that this one represents.

        Raises:
            CannotBeCaptured: it belongs to a captured step, which would repeat the prefix in every replay.
        """
        if self._full is None:
            parts = self._parts
            if parts.backend is not None:
                raise CannotBeCaptured(ONE_TENSOR)
            full = parts.prefix.repeat_interleave(parts.per_input, dim=0)
            own = parts.own()
            if own is not None:
                full = torch.cat([full, own], dim=2)
            if parts.tiles > 1:
                full = full.repeat(1, parts.tiles, 1, 1)
            if parts.ungrouped:
                full = full.unsqueeze(2).expand(-1, -1, parts.group, -1, -1)
            elif parts.group > 1:
                full = full.repeat_interleave(parts.group, dim=1)
            full = parts.expand(full)
            if parts.folded:
                full = full.flatten(0, 1)
            self._full = full.transpose(-1, -2) if parts.transposed else full
        return self._full

    # The default would print the contents.
    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an option for them
        with torch._C.DisableTorchFunctionSubclass():
            return f"KVView(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            if func not in METADATA and (rule := RULES.get(func)) is not None:
                try:
                    result = rule(*args, **kwargs)
                except _Unsupported:
                    result = NotImplemented
                if result is not NotImplemented:
                    return result
            # Goes on to __torch_dispatch__, where the full tensor replaces this one.
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, arguments = kwargs or {}, func._schema.arguments
        if func._schema.is_mutable:
            given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
            written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            if any(isinstance(given.get(name), KVView) for name in written):
                _refuse_write(func)
        args, kwargs = tree_map_only(KVView, KVView.materialize, (args, kwargs))
        return func(*args, **kwargs)


def of_latents(latents: KVView, rotary: KVView, weight: Tensor, dim: int) -> tuple[KVView, KVView]:
    """Returns the K and V that heads make of one latent vector per position, as in multi-head latent attention.

    Attention then reads only the latents: the query absorbs the products of K, and those of V follow attention
    (DeepSeek-V2, 2024, section 2.1.2).

    Args:
        latents, rotary: [rows, 1, length, any], stored as K and V of a layer. All heads share the rotated part of K.
        weight: [heads, dim + dim of V, rank]: each head multiplies the latents by it.
        dim: size of the part of K that comes from the latents.

    Raises:
        CannotBeCaptured: in a captured step, if latents and rotated part are not in one tensor.
    """
    parts, rank, heads = latents._parts, latents.shape[3], weight.shape[0]
    if parts.columns is None:  # they are in two tensors
        if parts.backend is not None:
            raise CannotBeCaptured(ONE_TENSOR)
        pairs = zip((parts.prefix, parts.suffix), (rotary._parts.prefix, rotary._parts.suffix), strict=True)
        prefix, suffix = (None if one is None or two is None else torch.cat([one, two], -1) for one, two in pairs)
        assert prefix is not None, "a view has a prefix"
        parts = replace(parts, prefix=prefix, suffix=suffix, gathered=[])
    keys, values = (
        replace(parts, group=heads, columns=columns, weight=part)
        for columns, part in ((None, weight[:, :dim]), (slice(rank), weight[:, dim:]))
    )
    return KVView._make(keys), KVView._make(values)


class CannotBeCaptured(RuntimeError):
    """A decoding step does something that cannot, or should not, be captured."""


class OfThisCall(CannotBeCaptured):
    """The reason lies in this call's inputs: other calls of its kind may be captured."""


ONE_TENSOR = "the model's attention wants all keys and values as one tensor"


class _Unsupported(Exception):
    """A rule does not support this use, so the full tensor is used instead."""


def _require(condition: bool) -> None:
    if not condition:
        raise _Unsupported


def _parts_of(value: Any) -> Parts:
    _require(isinstance(value, KVView))
    parts: Parts = value._parts
    if parts.columns is None or parts.weight is not None:
        return parts
    prefix, suffix = (None if part is None else part[..., parts.columns] for part in (parts.prefix, parts.suffix))
    assert prefix is not None, "a view has a prefix"
    return replace(parts, prefix=prefix, suffix=suffix, columns=None, gathered=[])


def _refuse_write(tensor: Any, *args: Any) -> Any:
    # The write would go to a temporary full tensor and be lost. Raising passes the whole call to the original code.
    raise RuntimeError("the model writes to cached keys or values in place")


# ---- views: these compute nothing, and only change what the tensor represents


def _same(tensor: Any, *args: Any, **kwargs: Any) -> KVView:
    """`contiguous`, and casts to the dtype and device that the tensor already has."""
    parts = _parts_of(tensor)
    for value in (*args, *kwargs.values()):
        _require(value in (parts.prefix.dtype, parts.prefix.device))
    return tensor


def _float(tensor: Any) -> KVView:
    parts = _parts_of(tensor)
    if parts.prefix.dtype is torch.float32:
        return tensor
    _require(parts.weight is None)
    own = parts.own()
    own = None if own is None else own.float()
    parts = replace(parts, prefix=parts.prefix.float(), suffix=own, ancestry=None, gathered=[])
    return KVView._make(replace(parts, materialize_suffix=None))


def _unsqueeze(tensor: Any, dim: int) -> KVView:
    """[rows, length, dim] of one head, read by several heads of an indexer."""
    parts = _parts_of(tensor)
    _require(dim == 1 and parts.folded and parts.heads == 1)
    return KVView._make(replace(parts, folded=False, by_query=True))


def _transpose(tensor: Any, dim0: int, dim1: int) -> KVView:
    parts = _parts_of(tensor)
    rank = len(parts.shape())
    _require({dim0 % rank, dim1 % rank} == {rank - 2, rank - 1})
    return KVView._make(replace(parts, transposed=not parts.transposed))


def _permute(tensor: Any, *dims: Any) -> KVView:
    order = _sizes(dims)
    rank = len(order)
    _require([dim % rank for dim in order] == [*range(rank - 2), rank - 1, rank - 2])
    return _transpose(tensor, -1, -2)


def _sizes(given: Any) -> Sequence[int]:
    """Returns one size per dimension; torch accepts them as separate arguments or as one sequence."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def _reshape(tensor: Any, *shape: Any) -> KVView:
    """Folding heads into rows and back, and the last step of repeating K/V heads."""
    parts = _parts_of(tensor)
    wanted = list(_sizes(shape))
    if -1 in wanted:
        known, total = math.prod(size for size in wanted if size != -1), math.prod(parts.shape())
        _require(known > 0 and total % known == 0)
        wanted[wanted.index(-1)] = total // known
    _require(not (parts.transposed or parts.by_query))
    for folded in (False, True):
        view = replace(parts, ungrouped=False, folded=folded)
        if list(view.shape()) == wanted:
            return KVView._make(view)
    raise _Unsupported


def _index(tensor: Any, index: Any) -> KVView:
    """`keys[:, :, None, :, :]`, the first step of repeating K/V heads for grouped queries."""
    parts = _parts_of(tensor)
    everything = slice(None)
    _require(isinstance(index, tuple) and 3 <= len(index) <= 5 and not parts.folded and not parts.ungrouped)
    _require(parts.group == 1 and not (parts.transposed or parts.by_query) and index[2] is None)
    _require(all(isinstance(part, slice) and part == everything for part in (*index[:2], *index[3:])))
    return KVView._make(replace(parts, ungrouped=True))


def _expand(tensor: Any, *sizes: Any) -> KVView:
    parts = _parts_of(tensor)
    wanted, shape = _sizes(sizes), parts.shape()
    if parts.ungrouped and parts.group == 1:
        _require(len(wanted) == 5 and wanted[2] > 0)
        parts = replace(parts, group=wanted[2])
        tensor, shape = KVView._make(parts), parts.shape()
    _require(len(wanted) == len(shape) and all(size in (-1, have) for size, have in zip(wanted, shape, strict=True)))
    return tensor


def _chunk(tensor: Any, chunks: int, dim: int = 0) -> tuple[KVView, ...]:
    """Splits the heads."""
    parts = _parts_of(tensor)
    _require(dim == 1 and _is_whole(parts) and parts.heads == parts.kv_heads and parts.kv_heads % chunks == 0)
    each = parts.kv_heads // chunks
    return tuple(KVView._make(parts.heads_of(slice(at, at + each))) for at in range(0, parts.kv_heads, each))


def _repeat(tensor: Any, *sizes: Any) -> KVView:
    """Repeats all heads, one after the other."""
    parts, wanted = _parts_of(tensor), _sizes(sizes)
    _require(_is_whole(parts) and parts.heads == parts.kv_heads)
    _require(len(wanted) == 4 and (wanted[0], *wanted[2:]) == (1, 1, 1) and wanted[1] > 0)
    return KVView._make(replace(parts, tiles=wanted[1]))


def _is_whole(parts: Parts) -> bool:
    """Whether the view is [rows, heads, length, dim]."""
    return not (parts.transposed or parts.folded or parts.ungrouped or parts.by_query)


def _cat(tensors: Any, dim: int = 0) -> Any:
    """Appends positions to all that a captured step has stored. Keeps them apart: joining would copy everything."""
    _require(len(tensors) == 2 and dim == 2 and type(tensors[1]) is Tensor)
    parts = _parts_of(tensors[0])
    _require(parts.backend is not None and parts.queries is None)
    _require(_is_whole(parts) and parts.tiles == 1)
    return parts.backend.with_own(tensors[0], tensors[1])


# ---- products of attention with K and V


def _product(left: Any, right: Any) -> Tensor:
    """`left @ right`, where right is K transposed (giving scores) or V (giving the context)."""
    parts = _parts_of(right)
    _require(parts.queries is None)  # these products would read other rows
    _require(type(left) is Tensor and left.dtype == parts.prefix.dtype and not parts.ungrouped)
    rank = 3 if parts.folded else 4
    _require(left.dim() == rank)
    if parts.by_query:
        return _product(left.transpose(1, 2), KVView._make(replace(parts, by_query=False))).transpose(1, 2)
    if parts.tiles > 1:
        _require(not parts.folded)
        return _apart(parts, _product(_together(parts, left), KVView._make(_as_group(parts))))
    heads = parts.heads
    if heads == 1 and not parts.folded:  # all heads of the query read it
        heads = left.shape[1]
    rows = left.shape[0] // heads if parts.folded else left.shape[0]
    x = left.reshape(rows, heads, *left.shape[-2:]) if parts.folded else left
    inner = parts.width if parts.transposed else parts.length
    _require(x.shape[:2] == (parts.rows, heads) and x.shape[3] == inner)
    if parts.transposed:
        result = shared_prefix_scores(parts.absorb(x), parts.prefix, parts.own())
    else:
        result = parts.expand(shared_prefix_context(x, parts.prefix, parts.own()))
    if parts.backend is not None and parts.transposed:
        result = parts.backend.leave_out(result)
    return result.flatten(0, 1) if parts.folded else result


def _as_group(parts: Parts) -> Parts:
    """Returns the parts with tiles as a group, for queries in the order of `_together`."""
    return replace(parts, tiles=1, group=parts.tiles * parts.group)


def _together(parts: Parts, x: Tensor) -> Tensor:
    """Sorts heads, [rows, heads, ...], by the kv head that they read."""
    return x.unflatten(1, (parts.tiles, parts.kv_heads, -1)).transpose(1, 2).flatten(1, 3)


def _apart(parts: Parts, x: Tensor) -> Tensor:
    """Undoes `_together`."""
    return x.unflatten(1, (parts.kv_heads, parts.tiles, -1)).transpose(1, 2).flatten(1, 3)


def _matmul(input: Any, other: Any = None, *, mat2: Any = None) -> Tensor:
    """`matmul`, or `bmm`, whose second parameter has another name."""
    return _product(input, other if mat2 is None else mat2)


def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _product(batch1, batch2)
    return torch.add(input if beta == 1 else input * beta, product, alpha=alpha)


def _einsum(equation: str, *operands: Any) -> Tensor:
    """An einsum that denotes a batched matrix product, such as "bntc,bncs->bnts"."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    _require(isinstance(equation, str) and len(operands) == 2)
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    _require(len(left) == len(right) == len(output) == len(set(left)) == len(set(right)) and len(left) >= 3)
    _require(left[:-2] == right[:-2] == output[:-2] and left[-1] == right[-2])
    _require(output[-2:] == left[-2] + right[-1] and left[-2] != right[-1])
    return _product(*operands)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on the stored K and V."""
    keys, values = _parts_of(key), _parts_of(value)
    _require(type(query) is Tensor and query.dim() == 4 and query.dtype == keys.prefix.dtype)
    _require(not is_causal and dropout_p == 0.0)
    _require(_is_whole(keys) and _is_whole(values))
    if keys.tiles > 1 or values.tiles > 1:
        _require(attn_mask is None or attn_mask.dim() < 3 or attn_mask.shape[-3] == 1)
        _require(keys.heads == values.heads and query.shape[1] % keys.heads == 0)
        further = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return _tiled_attention(query, keys, values, further)
    heads = keys.heads
    _require(keys.group == values.group and keys.length == values.length and query.shape[0] == keys.rows)
    _require(query.shape[1] == heads or heads == 1 or (enable_gqa and query.shape[1] % heads == 0))
    if keys.weight is not None:
        query, scale = keys.absorb(query), query.shape[3] ** -0.5 if scale is None else scale
    if keys.backend is not None:
        return values.expand(keys.backend.attend(query, keys, values, attn_mask, scale))
    ancestry, own = keys.ancestry, (keys.suffix, values.suffix)
    if ancestry is not None and not pays(query, (keys.prefix, values.prefix), own, attn_mask):
        ancestry, own = None, (keys.own(), values.own())
    context = shared_prefix_attention(query, keys.prefix, values.prefix, *own, attn_mask, scale, ancestry=ancestry)
    return values.expand(context)


def _tiled_attention(query: Tensor, keys: Parts, values: Parts, further: tuple[Any, ...]) -> Tensor:
    """Attention whose K, or V, or both, repeat all their heads."""
    if keys.tiles == values.tiles:
        key, value = (KVView._make(_as_group(each)) for each in (keys, values))
        return _apart(keys, _attention(_together(keys, query), key, value, *further))
    tiles = max(keys.tiles, values.tiles)
    _require({keys.tiles, values.tiles} == {1, tiles})
    parts = zip(query.chunk(tiles, dim=1), _of_tiles(keys, tiles), _of_tiles(values, tiles), strict=True)
    return torch.cat([_attention(*each, *further) for each in parts], dim=1)


def _of_tiles(parts: Parts, tiles: int) -> Iterator[KVView]:
    """Yields the heads of each tile; if the view has none, as many of its heads."""
    each = parts.kv_heads * parts.tiles // tiles
    for tile in range(tiles):
        first = 0 if parts.tiles > 1 else tile * each
        yield KVView._make(replace(parts.heads_of(slice(first, first + each)), tiles=1))


# Names of methods, and of torch functions of the same name.
_NAMES: dict[Callable[..., Any], str] = {
    _refuse_write: "__setitem__",
    _same: "contiguous to",
    _float: "float",
    _unsqueeze: "unsqueeze",
    _transpose: "transpose",
    _permute: "permute",
    _reshape: "reshape view",
    _index: "__getitem__",
    _expand: "expand",
    _chunk: "chunk",
    _repeat: "repeat",
    _matmul: "matmul __matmul__ bmm",
    _baddbmm: "baddbmm",
}
_OWNED = ((owner, name, rule) for rule, names in _NAMES.items() for name in names.split() for owner in (Tensor, torch))
RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(owner, name): rule for owner, name, rule in _OWNED if hasattr(owner, name)},
    torch.cat: _cat,
    torch.einsum: _einsum,
    F.scaled_dot_product_attention: _attention,
}
