"""Layers with low-bit weights from a checkpoint, which multiply without unpacking the whole weight.

Until its tensors are loaded, a layer has them as parameters under the names of the file. `pack` converts them into one
form and drops them. State dicts contain the file's tensors again, made from that form, if the format can be written;
otherwise the weight in floating point, like the state dict of an ordinary layer.

A layer is an instance of the class that it replaces, and has its attributes. Its weight is not a parameter, and cannot
be written to. Code that reads weights gets an `Unpacked`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from fastgen.ops.linear.weights import PackedWeight
from fastgen.quantization import layer_weight
from fastgen.quantization.checkpoint import Format, dequantized
from fastgen.quantization.layer_weight import PARTS

# By the `qweight` before a move: the layer that has moved it.
_moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The models of this process that have such layers, and the format that each was read from.
_formats: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def keeps_bits(model: object) -> bool:
    """Whether layers of the model have low-bit weights."""
    return isinstance(model, nn.Module) and any(isinstance(module, QuantizedWeight) for module in model.modules())


class QuantizedWeight(nn.Module):
    """A module with a low-bit weight, [N, K]: the base of linear layers and embeddings.

    Args:
        stored: the tensors of the file, on the device "meta", by their names.
        dtype: the model's dtype, for the weight in floating point.
    """

    # Whether the visible weight is [K, N].
    transposed: ClassVar[bool] = False
    like: Tensor

    def __init__(self, n: int, k: int, form: Format, stored: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # not that of the replaced class, which would make a weight
        self.activations: str | None = None  # "float" or "int8"; None: follow `Settings.activations`
        self.n, self.k, self.form = n, k, form
        self.stored_dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        self.sizes: tuple[Any, ...] | None = None  # of a `PackedWeight`, after its tensors; None until it is packed
        for name, tensor in stored.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        for part in PARTS:
            self.register_buffer(f"packed_{part}", None, persistent=False)
        # Holds the dtype, and follows `module.to(dtype)`; the parts of the weight do not.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)

    def pack(self) -> None:
        """Converts the loaded tensors into the form that kernels read, and drops them.

        Raises ValueError if they do not fit.
        """
        loaded = {name: self._parameters.get(name) for name in self.stored_dtypes}
        self._take({name: parameter.detach() for name, parameter in loaded.items() if parameter is not None})

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self.form = self.form.resolved(tensors)
        self._keep(layer_weight.pack(self.form.read(tensors, self.n, self.k)))

    def _keep(self, packed: PackedWeight) -> None:
        for part in PARTS:
            setattr(self, f"packed_{part}", getattr(packed, part))
        self.sizes = packed[len(PARTS) :]
        self.like = self.like.to(packed.qweight.device)
        for name in self.stored_dtypes:
            self._parameters.pop(name, None)

    def share(self, other: QuantizedWeight) -> None:
        """Shares the weight of another layer from now on; it is in memory once."""
        self.form, self.stored_dtypes = other.form, other.stored_dtypes
        self._keep(other.packed)

    @property
    def bits(self) -> int | None:
        """Bits of a value, once the weight is packed."""
        return None if self.sizes is None else self.packed.bits

    @property
    def packed(self) -> PackedWeight:
        """The weight, once it is packed."""
        if self.sizes is None:
            raise RuntimeError("the weight of this layer has not been loaded")
        parts: list[Any] = [self._buffers[f"packed_{part}"] for part in PARTS]
        return PackedWeight(*parts, *self.sizes)

    @property
    def weight(self) -> Any:
        """The weight in floating point, for code that reads weights; layers do not use it.

        It is on the device "meta" until the weight is loaded. The first operation on it then unpacks it: some code,
        such as T5's, only reads its dtype.
        """
        like, shape = self.like, self._shown_shape()
        if self.sizes is None:
            return torch.empty(shape, dtype=like.dtype, device="meta")
        packed = self.packed
        return Unpacked.of(shape, like.dtype, like.device, self, lambda: self._shown(packed, like.dtype))

    def _shown_shape(self) -> tuple[int, int]:
        return (self.k, self.n) if self.transposed else (self.n, self.k)

    def _shown(self, packed: PackedWeight, dtype: torch.dtype) -> Tensor:
        found = dequantized(layer_weight.unpack(packed), dtype)
        return found.t().contiguous() if self.transposed else found

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name != "weight":
            super().register_parameter(name, param)
        elif isinstance(param, Unpacked) and param.owner is not None and param.shape == self._shown_shape():
            self.share(param.owner)  # as code does that ties weights
        else:
            raise RuntimeError(f"weights that are kept in their bits cannot be replaced: {UNPACK}")

    def named_parameters(self, prefix: str = "", *rest: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Includes the weight if this layer alone is asked: it refuses training. Those of a model do not include it."""
        if self.sizes is not None:
            yield f"{prefix}.weight" if prefix else "weight", self.weight
        yield from super().named_parameters(prefix, *rest, **named)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weight in floating point, [N, K], by default in the model's dtype."""
        return dequantized(layer_weight.unpack(self.packed), dtype or self.like.dtype)

    def dequantize(self) -> nn.Module:
        """Returns a plain layer with the same weight in floating point."""
        plain = self._plain(self.like.dtype)
        plain.register_parameter("weight", nn.Parameter(self._shown(self.packed, self.like.dtype), requires_grad=False))
        if "bias" in self._parameters:
            plain.register_parameter("bias", self._parameters["bias"])
        return plain.train(self.training)

    def _plain(self, dtype: torch.dtype) -> nn.Module:
        """Returns the layer that this one replaces, on the device "meta"."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return sum(part.nbytes for part in self.packed if isinstance(part, Tensor))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Moves to another device, but not to another dtype: rounding a scale changes a whole group.
        kept = {f"packed_{part}": self._buffers[f"packed_{part}"] for part in PARTS}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        qweight = kept["packed_qweight"]
        if qweight is not None and self.packed.qweight.device.type not in (qweight.device.type, "meta"):
            self._keep(self._moved_from(qweight))
        return self

    def _moved_from(self, before: Tensor) -> PackedWeight:
        """Returns the weight on another kind of device; that of a layer which shared it and moved earlier."""
        other = _moved[before]() if before in _moved else None
        if other is None or other.packed.qweight.device != self.packed.qweight.device:
            _moved[before] = weakref.ref(self)
            return layer_weight.moved(self.packed)
        return other.packed

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.sizes is not None and self.form.writable:
            tensors = self.form.write(layer_weight.unpack(self.packed))
            destination |= {prefix + name: tensors[name].to(dtype) for name, dtype in self.stored_dtypes.items()}
        elif self.sizes is not None:
            destination[f"{prefix}weight"] = self.weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        *_, missing_keys, unexpected_keys, error_msgs = rest
        if self.sizes is None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            return
        found: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, *[*rest[:-2], found, error_msgs])
        names = {prefix + name: name for name in (self.stored_dtypes if self.form.writable else ("weight",))}
        unexpected_keys += [key for key in found if key not in names]
        missing = [key for key in names if key not in state_dict]
        missing_keys += missing
        if missing:
            return
        try:
            if self.form.writable:
                self._take({name: state_dict[key].to(self.like.device) for key, name in names.items()})
            else:
                self._check_same(state_dict[f"{prefix}weight"])
        except ValueError as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")

    def _check_same(self, weight: Tensor) -> None:
        """Raises ValueError if a weight in floating point differs from this one."""
        own = self.weight
        if weight.shape != own.shape or not torch.equal(own, weight.to(own)):
            raise ValueError(f"weights that are kept in their bits take no other values: {UNPACK}")

    def extra_repr(self) -> str:
        return f"{self.k}, {self.n}, {self.form.name}, bits={self.bits}"


class QuantizedLinearLayer(QuantizedWeight):
    """A linear layer with a low-bit weight; x is [..., K] in any floating dtype, the result [..., N]."""

    bias: Any  # the parameter, or None

    def __init__(self, *weight: Any, bias: nn.Parameter | None = None) -> None:
        super().__init__(*weight)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return layer_weight.linear(x, self.packed, self.bias, self.activations)


class QuantizedLinear(QuantizedLinearLayer, nn.Linear):  # type: ignore[override]  # its weight is no parameter
    """Replaces a linear layer of torch."""

    def __init__(self, *weight: Any, bias: nn.Parameter | None = None) -> None:
        super().__init__(*weight, bias=bias)
        self.in_features, self.out_features = self.k, self.n

    def _plain(self, dtype: torch.dtype) -> nn.Linear:
        return nn.Linear(self.k, self.n, self.bias is not None, device="meta", dtype=dtype)


def is_plain_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a `QuantizedEmbedding` computes what this module does."""
    return type(module) is nn.Embedding and module.max_norm is None


class QuantizedEmbedding(QuantizedWeight, nn.Embedding):  # type: ignore[override]  # its weight is no parameter
    """An embedding with a low-bit weight, [tokens, size]; unpacks only the rows that are looked up."""

    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(self, *weight: Any, padding_idx: int | None = None) -> None:
        super().__init__(*weight)
        self.num_embeddings, self.embedding_dim, self.padding_idx = self.n, self.k, padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        found = layer_weight.rows(self.packed, tokens.reshape(-1).long(), self.like.dtype)
        return found.view(*tokens.shape, self.k)

    def _plain(self, dtype: torch.dtype) -> nn.Embedding:
        return nn.Embedding(self.n, self.k, self.padding_idx, device="meta", dtype=dtype)


def note_format(model: nn.Module, form: str) -> None:
    """Records the format that the model was read from."""
    _formats[model] = form


def notes() -> list[str]:
    """Returns a line for each such model that still exists, and has not been unpacked since."""
    return [line for model in list(_formats) if (line := described(model)) is not None]


def described(model: nn.Module) -> str | None:
    """Returns a line about a model that keeps low-bit weights; None for any other model."""
    form = _formats.get(model)
    layers = [each for each in model.modules() if isinstance(each, QuantizedWeight) and each.bits is not None]
    if form is None or not layers:
        return None
    distinct = {layer.packed.qweight.data_ptr(): layer for layer in layers}.values()  # tied ones count once
    size = sum(layer.nbytes for layer in distinct)
    full = sum(layer.n * layer.k * 4 for layer in distinct)
    *some, last = (str(bits) for bits in sorted({layer.bits or 0 for layer in layers}))
    bits = f"{', '.join(some)} and {last}" if some else last
    return (
        f"{type(model).__name__} read from {form}: {len(layers)} layers of {bits} bits in {size / 2**20:.1f} MiB, "
        f"{full / 2**20:.1f} MiB in float32"
    )


# ---- the weight of a layer in floating point: unpacked by the first operation that reads it
#
# It is a tensor whose shape, type and device are known. It cannot be written to: it is a copy, so a write would be lost
# silently.

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
