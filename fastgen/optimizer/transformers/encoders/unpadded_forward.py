"""The forward pass of an encoder stack without padding, inside the call of an encoder.

The model's own code computes the stack's inputs, and reads its outputs, in which padded positions hold a fill value,
such as NaN. Over a batch of sequences of equal length, FastGen's operator attends; torch's attention runs in all other
cases, and where measurements show that it is faster.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastgen import patching, releases
from fastgen.decoding import unpadding
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.unpadding import Packing
from fastgen.interrupts import cached_property
from fastgen.optimizer.transformers.encoders.stacks import RIGHT_PADDED, VARLEN

# Cost of a further bucket, in positions: small linear ops are slow, and the model's Python code takes time.
BUCKET_COST = 32
Buckets = Sequence[tuple[Tensor, slice]]
_NOT_PER_TOKEN = "results of the layers that are not one for each token"
# Arguments of a stack with the shape [batch, positions, ...].
_PER_POSITION = ("hidden_states", "input_ids", "inputs_embeds", "position_ids", "token_type_ids", "bbox")


class Declined(Exception):
    """This call needs its padding; the message says why."""


class Unexpected(Declined):
    """The padding is needed because the model does something that no tested release does."""


class UnpaddedForward:
    """The forward pass of the stack in one call of an encoder.

    Args:
        mask: [batch, longest], bool: where the tokens are. Padding may precede them, follow them, or be among them.
        fill: the value of padded positions in the stack's output.
        buckets: sequences that run together, and their positions; by default they are found here.

    Attributes:
        has_run: the stack has run without padding.
    """

    current: ContextVar[UnpaddedForward | None] = ContextVar("fastgen_encoder", default=None)

    def __init__(self, stack: Any, way: str, mask: Tensor, fill: float, buckets: Buckets = ()) -> None:
        self.stack = stack
        self._fill = fill
        self._way = way
        self._mask, self._buckets = mask, buckets
        self.has_run = False
        self.packing: Packing | None = None  # while the layers run on packed tokens
        self._row: Packing | None = None  # the packing that they have run on
        self._made: list[Tensor] = []  # padded states
        self._attended = 0

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the stack's forward pass."""
        self.has_run = True
        bound = inspect.signature(forward).bind(*args, **kwargs)
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        if not self._leaves_out_padding(given.get("attention_mask")):
            raise Declined("the layers get another mask than the model")
        return self._packed(forward, given) if self._way == VARLEN else self._grouped(forward, given)

    def _leaves_out_padding(self, seen: Any) -> bool:
        """Whether this mask of the layers hides exactly the padding from the tokens.

        Its shape is [batch, longest], with 0 for padding; or [batch, 1, longest or 1, longest], bool or added to the
        scores.
        """
        if not isinstance(seen, Tensor):
            return False
        mask = self._mask
        if seen.dim() == 2:
            return seen.shape == mask.shape and torch.equal(seen.bool(), mask)
        longest = mask.shape[1]
        if seen.dim() != 4 or seen.shape[0] != mask.shape[0] or seen.shape[2] not in (1, longest):
            return False
        if seen.shape[3] != longest:
            return False
        if seen.shape[2] == 1:
            seen, expected = seen[:, :, 0], mask
        else:  # what padding attends to does not matter
            rows, columns = mask.nonzero(as_tuple=True)
            seen, expected = seen[rows, :, columns], mask[rows]
        is_seen = seen if seen.dtype is torch.bool else seen == 0
        return bool((is_seen == expected.unsqueeze(1)).all())

    @cached_property
    def _tokens(self) -> Packing:
        return Packing(self._mask)

    def packed(self, value: Tensor) -> Tensor | None:
        """Packs a tensor [batch or 1, longest, ...]; returns None if it has another shape."""
        batch, longest = self._mask.shape
        is_per_position = value.dim() > 1 and value.shape[0] in (1, batch) and value.shape[1] == longest
        return self._tokens.pack(value.expand(batch, *value.shape[1:])) if is_per_position else None

    def _packed(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        packing = self._tokens
        given = {name: self._packed_argument(name, value) for name, value in given.items()}
        self.packing = self._row = packing
        try:
            result = forward(**given)
        finally:
            self.packing = None
        if not self._attended:
            raise Unexpected("attention that is not in the library's functions")

        def unpacked(states: Tensor) -> Tensor:
            if not self._is_row(states):
                raise Declined(_NOT_PER_TOKEN)
            return self._remembered(packing.unpack(states, self._fill))

        return mapped(result, unpacked)

    def _is_row(self, states: Tensor) -> bool:
        """Whether states are packed. A batch with padding has more positions, or more rows."""
        return self._row is not None and states.dim() == 3 and states.shape[:2] == (1, self._row.total)

    def _remembered(self, states: Tensor) -> Tensor:
        self._made.append(states)
        return states

    def padded(self, result: Tensor) -> Tensor:
        """Unpacks packed states, with padding between them; returns other tensors unchanged."""
        if self._row is None or not self._is_row(result):
            return result
        return self._remembered(self._row.unpack(result, self._fill))

    def has_made(self, result: Tensor) -> bool:
        """Whether these are states of the stack, whose padded positions hold the fill value."""
        return any(result is each for each in self._made)

    def _packed_argument(self, name: str, value: Any) -> Any:
        if name == "attention_mask":  # it is equivalent to `self._mask`
            return None
        if holds_no_tensor(value):
            return value
        row = self.packed(value) if name in _PER_POSITION and isinstance(value, Tensor) else None
        if row is None:
            raise Unexpected(f"an argument of the layers ({name})")
        return row

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Replaces the library's attention functions while the layers run on packed tokens."""
        name = changing_argument(kwargs)
        if name is not None:
            raise Unexpected(f"an argument of attention ({name})")
        if self.packing is None or attention_mask is not None or dropout or getattr(module, "is_causal", False):
            raise Declined("attention that is more than over all tokens of a sequence")
        if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == self.packing.total:
            raise Declined("attention over others than the tokens of the batch")
        self._attended += 1
        return self.packing.attend(query, key, value, scaling), None

    def _grouped(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        buckets = self._buckets or self._own_buckets()
        results_of = [forward(**{name: self._part(name, each, *at) for name, each in given.items()}) for at in buckets]
        return tree_map(lambda *parts: self._merged(buckets, parts), *results_of)

    def _own_buckets(self) -> Buckets:
        in_front = not bool(self._mask[:, 0].all())
        if in_front and (self._way == RIGHT_PADDED or not bool(self._mask[:, -1].all())):
            raise Declined("padding in front of the tokens")
        buckets = unpadding.by_mask(self._mask, in_front, cost=BUCKET_COST)
        if not buckets:  # a single bucket, as long as its longest sequence
            longest = int(self._mask.sum(dim=1).max())
            buckets = [(torch.arange(len(self._mask)), slice(-longest, None) if in_front else slice(longest))]
        return buckets

    def _merged(self, buckets: Buckets, parts: tuple[Any, ...]) -> Any:
        """Merges the tensors of the buckets into one of the batch."""
        if all(part is None for part in parts):
            return None
        batch, longest = self._mask.shape
        result: Tensor | None = None
        for (rows, columns), states in zip(buckets, parts, strict=True):
            mask = self._mask[rows, columns]
            if not isinstance(states, Tensor) or states.shape[:1] != mask.shape[:1]:
                raise Declined(_NOT_PER_TOKEN)
            is_pooled = states.dim() == 2  # one state per sequence, of the first token
            if is_pooled:
                result = states.new_empty(batch, states.shape[1]) if result is None else result
                result[rows] = states
                continue
            if states.shape[:2] != mask.shape or states.dim() != 3:
                raise Declined(_NOT_PER_TOKEN)
            if result is None:
                result = states.new_full((batch, longest, states.shape[2]), self._fill)
            result[rows, columns] = states.masked_fill(~mask.unsqueeze(2), self._fill)
        return self._remembered(result) if result is not None and result.dim() == 3 else result

    def _part(self, name: str, value: Any, rows: Tensor, columns: slice) -> Any:
        """Returns the part of an argument that belongs to a bucket."""
        if holds_no_tensor(value):
            return value
        batch, longest = self._mask.shape
        if name in _PER_POSITION and value.shape[1] == longest and value.shape[0] in (1, batch):
            return value[rows, columns] if value.shape[0] == batch else value[:, columns]
        if name == "attention_mask" and value.shape[-1] == longest and value.shape[0] in (1, batch):
            part = value[rows] if value.shape[0] == batch else value
            if value.dim() > 2 and value.shape[-2] == longest:
                part = part[..., columns, :]
            return part[..., columns]
        raise Unexpected(f"an argument of the layers ({name})")


def holds_no_tensor(value: Any) -> bool:
    """Whether an argument certainly holds no tensor."""
    return value is None or isinstance(value, bool | int | float | str)


def stack(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps the forward pass of a stack."""
    unpadded = UnpaddedForward.current.get()
    if unpadded is None or module is not unpadded.stack or unpadded.has_run:
        return wrapped(*args, **kwargs)
    return unpadded.run(wrapped, args, kwargs)


def get_interface(wrapped: Any, interfaces: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `AttentionInterface.get_interface`."""
    unpadded = UnpaddedForward.current.get()
    if unpadded is not None and unpadded.packing is not None:
        return unpadded.attend
    return replaced(wrapped(*args, **kwargs))


# ---- attention

# Arguments of attention functions that change which tokens of its sequence a token attends to.
_CHANGING = ("sliding_window", "softcap", "s_aux", "position_bias", "is_causal", releases.PAGED_CACHE)

_is_overridden: ContextVar[bool] = ContextVar("fastgen_overridden_attention", default=False)


def override_attention() -> AbstractContextManager[None]:
    """A context in which `over_all_tokens` replaces the library's attention function for SDPA."""
    return patching.held(_is_overridden, True)


def changing_argument(kwargs: Mapping[str, Any]) -> str | None:
    """Returns the name of an argument that changes which tokens attend to each other; None if none is given."""
    given = ((name, kwargs.get(name)) for name in _CHANGING)
    return next((name for name, value in given if value is not None and value is not False), None)


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the attention function that runs in place of a library function."""
    if function is not sdpa_attention_forward or not _is_overridden.get() or not patching.is_active():
        return function
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return function
    # Compiled or captured code keeps the library's function.
    return function if torch.compiler.is_compiling() or is_capturing() else over_all_tokens


def over_all_tokens(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`sdpa_attention_forward`, by FastGen's operator if each token attends to exactly all tokens of its sequence."""
    is_over_all = attention_mask is None and not dropout and not getattr(module, "is_causal", True)
    if is_over_all and changing_argument(kwargs) is None:
        context = unpadding.attend_equal(query, key, value, scaling)
        if context is not None:
            return context, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


# ---- the tensors of a result, in tuples, lists and dicts, including Transformers' own output classes

# Types that hold no tensor of a result; a module's tensors are its own.
_WITHOUT = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Generator, nn.Module,
)  # fmt: skip


def mapped(result: Any, function: Callable[[Tensor], Tensor], without: tuple[type, ...] = _WITHOUT) -> Any:
    """Returns a copy of a result with `function` applied to each tensor.

    Parts of the types in `without` hold no tensor, and stay. Raises Declined for a part that may hold tensors.
    """
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, without):
        return result
    if isinstance(result, tuple | list):
        parts = [mapped(part, function, without) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if isinstance(result, dict) and all(isinstance(name, str) for name in result):
        return type(result)(**{name: mapped(part, function, without) for name, part in result.items()})
    raise Declined(f"a result of type {type(result).__name__}")
