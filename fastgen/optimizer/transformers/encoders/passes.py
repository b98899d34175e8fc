"""The forward pass of a stack of layers without padding, inside the call of an encoder.

The model's own code makes what goes into the stack, and works with what comes out of it. There, padded positions hold NaN.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fastgen.decoding import length_buckets
from fastgen.decoding.packing import Packing
from fastgen.optimizer.transformers.encoders.stacks import OF_TOKENS, PACKED

# What a further pass costs, in positions: a small one multiplies slowly, and takes the time of the model's Python code.
PASS = 32
# Arguments of attention functions that change what one token sees of the others of its text.
_OF_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "is_causal")
# Arguments of a stack with a row for each text and a column for each position.
_PER_POSITION = ("hidden_states", "input_ids", "inputs_embeds", "position_ids", "token_type_ids", "bbox")


class Declined(Exception):
    """This pass cannot do without padding; the message says why."""


class Passes:
    """What one call of an encoder has its stack do.

    Attributes:
        has_run: the stack has run without padding.
    """

    current: ContextVar[Passes | None] = ContextVar("fastgen_encoder", default=None)

    def __init__(self, stack: Any, way: str, mask: Tensor) -> None:
        self._stack = stack
        self._way = way
        self._mask = mask  # [texts, longest], bool
        self.has_run = False
        self.packing: Packing | None = None  # while the layers run on one row
        self._attended = 0

    def is_of(self, module: Any) -> bool:
        return module is self._stack and not self.has_run

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stack's forward pass."""
        self.has_run = True
        bound = inspect.signature(forward).bind(*args, **kwargs)
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        return self._packed(forward, given) if self._way == PACKED else self._grouped(forward, given)

    def _packed(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        packing = Packing(self._mask)
        given = {name: self._packed_argument(packing, name, value) for name, value in given.items()}
        self.packing = packing
        try:
            result = forward(**given)
        finally:
            self.packing = None
        if not self._attended:
            raise Declined("attention that is not in the library's functions")

        def unpacked(states: Tensor) -> Tensor:
            if states.shape[:2] != (1, packing.total):
                raise Declined("results of a layer that are not one for each token")
            return packing.unpack(states)

        return _mapped(result, unpacked)

    def _packed_argument(self, packing: Packing, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name == "attention_mask":
            return None if name == "attention_mask" else value
        if name not in _PER_POSITION or value.shape[:2] != self._mask.shape:
            raise Declined(f"an argument of the layers ({name})")
        return packing.pack(value)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """In the place of an attention function of the library, while the layers run on one row."""
        for name in _OF_ATTENTION:
            if kwargs.get(name) not in (None, False):
                raise Declined(f"an argument of attention ({name})")
        if self.packing is None or attention_mask is not None or dropout or getattr(module, "is_causal", False):
            raise Declined("attention that is more than over all tokens of a text")
        if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == self.packing.total:
            raise Declined("attention over others than the tokens of the batch")
        self._attended += 1
        return self.packing.attend(query, key, value, scaling), None

    def _grouped(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        texts, longest = self._mask.shape
        in_front = not bool(self._mask[:, 0].all())
        if in_front and (self._way == OF_TOKENS or not bool(self._mask[:, -1].all())):
            raise Declined("padding in front of the tokens")
        groups = length_buckets.groups(self._mask, in_front, cost=PASS)
        if not groups:
            raise Declined("too little padding")
        full: dict[int, Tensor] = {}
        result = None
        for rows, columns in groups:
            part = {name: self._part(name, value, rows, columns) for name, value in given.items()}
            length = longest if columns.stop is None and columns.start is None else (columns.stop or longest)
            length -= columns.start or 0
            numbers = iter(range(2**16))

            def placed(
                states: Tensor, rows: Tensor = rows, columns: slice = columns, length: int = length, numbers: Any = numbers
            ) -> Tensor:
                is_per_position = states.dim() > 2 and states.shape[1] == length
                if states.shape[0] != len(rows) or not (is_per_position or states.dim() == 2):
                    raise Declined("results of a layer that are not one for each token")
                shape = (texts, longest, *states.shape[2:]) if is_per_position else (texts, *states.shape[1:])
                number = next(numbers)
                if number not in full:
                    full[number] = states.new_full(shape, float("nan"))
                if is_per_position:
                    full[number][rows, columns] = states.masked_fill(
                        ~self._mask[rows, columns].view(*states.shape[:2], *[1] * (states.dim() - 2)), float("nan")
                    )
                else:
                    full[number][rows] = states
                return full[number]

            result = _mapped(forward(**part), placed)
        return result

    def _part(self, name: str, value: Any, rows: Tensor, columns: slice) -> Any:
        """The part of an argument that some texts have."""
        if not isinstance(value, Tensor):
            return value
        texts, longest = self._mask.shape
        if name in _PER_POSITION and value.shape[1] == longest and value.shape[0] in (1, texts):
            return value[rows, columns] if value.shape[0] == texts else value[:, columns]
        if name == "attention_mask" and value.shape[-1] == longest and value.shape[0] in (1, texts):
            part = value[rows] if value.shape[0] == texts else value
            if value.dim() > 2 and value.shape[-2] == longest:
                part = part[..., columns, :]
            return part[..., columns]
        raise Declined(f"an argument of the layers ({name})")


def _mapped(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The result of a stack with a function of each tensor in their place."""
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, dict):
        return type(result)(**{name: _mapped(value, function) for name, value in result.items()})
    if isinstance(result, tuple | list):
        return type(result)(_mapped(value, function) for value in result)
    if result is not None:
        raise Declined(f"a result of the layers of type {type(result).__name__}")
    return None


def stack(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of the forward pass of a stack."""
    passes = Passes.current.get()
    if passes is None or not passes.is_of(module):
        return wrapped(*args, **kwargs)
    return passes.run(wrapped, args, kwargs)


def get_interface(wrapped: Any, interfaces: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `AttentionInterface.get_interface`."""
    passes = Passes.current.get()
    if passes is None or passes.packing is None:
        return wrapped(*args, **kwargs)
    return passes.attend
