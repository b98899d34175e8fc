"""Buffers that get more memory while programs that were recorded with them stay valid.

The KV cache of a captured step is as large as the calls so far have needed. A longer call gets larger buffers, and the
program stays: it only hands them to operators that read their sizes when they run. The lengths of prompts and outputs
are therefore not part of a recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastgen.decoding.recorded_graph import Constant, Operation, TensorRef
from fastgen.ops import attention, kv_write, search_step  # noqa: F401 (define operators)

# Operators that read the sizes of such buffers when they run.
_FOLLOWING = frozenset(
    getattr(torch.ops.fastgen, name).default
    for name in ("advance_", "decode_attention_out", "kv_write", "take_beams_", "take_rows_")
)
# Smaller sizes do not identify a buffer, because many other tensors have them.
LEAST_LENGTH = 32


class Growing:
    """The buffers of a step that may grow, and the tensors through which programs use them.

    Attributes:
        lengths: the buffers' sizes in positions, and sums of them. A program must not contain these numbers elsewhere.
    """

    def __init__(self) -> None:
        self.lengths: frozenset[int] = frozenset()
        self._buffers: dict[int, Tensor] = {}  # by the address of their storage
        # Views that programs have of a buffer, whether the first two dimensions are folded, and the number of rows.
        self._views: dict[int, list[tuple[weakref.ref[Tensor], int, int]]] = {}

    def add(self, *buffers: Tensor) -> None:
        """Adds buffers to which `exchange` may give other memory."""
        for buffer in buffers:
            self._buffers[_address(buffer)] = buffer

    def exchange(self, buffer: Tensor, new: Tensor) -> None:
        """Gives `buffer`, and the views that programs have of it, the memory and the shape of `new`."""
        before = _address(buffer)
        del self._buffers[before]
        with torch._C._InferenceMode(True):  # programs make their views in this mode
            _point(buffer, new)
            views = [each for each in self._views.pop(before, ()) if each[0]() is not None]
            for view, folded, rows in views:
                _point(view(), (new.flatten(0, 1) if folded else new)[:rows])
        self._buffers[_address(buffer)] = buffer
        self._views[_address(buffer)] = views

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is the memory of one of the buffers."""
        return storage._cdata in self._buffers

    def serves(self, operations: Iterable[Operation], storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether a program of these operations stays valid with larger buffers."""
        return all(self._is_free(each, storages) for each in operations)

    def touches(self, operation: Operation, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether an operation uses one of the buffers, so that no replacement of it may keep the buffer's address."""
        return any(self.has(storages[number]) for number in operation.used | operation.made)

    def note(self, view: Tensor, storage: torch.UntypedStorage) -> None:
        """Notes a program's view of this storage, which follows the buffer's memory if it belongs to one.

        The program must be one that `serves` accepts.
        """
        folded = self._folded(storage, TensorRef.of(0, view), is_whole=False)
        if folded is not None:
            self._views.setdefault(storage._cdata, []).append((weakref.ref(view), folded, view.shape[0]))

    def _is_free(self, operation: Operation, storages: Sequence[torch.UntypedStorage]) -> bool:
        for arg in (*operation.args, *operation.outputs):
            if isinstance(arg, Constant):
                if type(arg.value) is int and arg.value in self.lengths:
                    return False
            elif arg is not None and self.has(storages[arg.storage]):
                if operation.function not in _FOLLOWING or self._folded(storages[arg.storage], arg) is None:
                    return False
            elif arg is not None and self._has_length(arg):
                return False
        return True

    def _has_length(self, ref: TensorRef) -> bool:
        """Whether a size of the tensor is a length in positions, or a multiple of one."""
        return any(
            size >= length >= LEAST_LENGTH and size % length == 0 for size in ref.size for length in self.lengths
        )

    def _folded(self, storage: torch.UntypedStorage, ref: TensorRef, is_whole: bool = True) -> int | None:
        """Returns 0 if a tensor is a whole buffer, 1 if it is one with the first two dimensions folded, else None.

        Unless `is_whole`, the tensor may also consist of the first rows of these.
        """
        buffer = self._buffers.get(storage._cdata)
        if buffer is None:
            return None
        for folded, view in enumerate((buffer, buffer.flatten(0, 1))):
            size = tuple(view.shape) if is_whole else (*ref.size[:1], *view.shape[1:])
            if (ref.size, ref.stride, ref.offset) == (size, view.stride(), view.storage_offset()):
                return folded
        return None


def _address(buffer: Tensor) -> int:
    return buffer.untyped_storage()._cdata


def _point(tensor: Tensor | None, new: Tensor) -> None:
    if tensor is not None:
        tensor.set_(new.untyped_storage(), new.storage_offset(), new.shape, new.stride())
