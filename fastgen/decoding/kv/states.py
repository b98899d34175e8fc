"""States of captured steps besides K and V: those of linear attention, state spaces, or a short convolution.

A state has one size, whatever the length of the sequences. It cannot be set back: each step overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

# A state of a layer: its kind, and its number among states of the kind.
Name = tuple[str, int]
States = Mapping[Name, Tensor]
"""The states of a layer, [rows, ...] each."""


def of_each(states: States, function: Callable[[Tensor], Tensor]) -> dict[Name, Tensor]:
    """Applies a function to each state."""
    return {name: function(state) for name, state in states.items()}


class FixedStates:
    """The states of a layer in buffers of fixed addresses, which a captured step changes in place.

    Attributes:
        buffers: [batch * per_input, ...] each.
    """

    def __init__(self, like: States, batch: int, per_input: int) -> None:
        self._batch, self._per_input = batch, per_input
        self.buffers = of_each(like, lambda state: state.new_zeros(batch * per_input, *state.shape[1:]))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def load(self, states: States, inputs: slice = slice(None)) -> None:
        """Loads the states that the prefill has left, [inputs, ...] each. The remaining `inputs` get zeros."""
        self.leave(inputs)
        for name, buffer in self.buffers.items():
            part = self._by_input(buffer)[inputs]
            part[: states[name].shape[0]] = states[name].unsqueeze(1)

    def insert(self, other: FixedStates, source: Tensor | slice, target: slice) -> None:
        """Has the inputs at `source` in `other` continue at `target`."""
        for name, buffer in self.buffers.items():
            self._by_input(buffer)[target] = other._by_input(other.buffers[name])[source]

    def leave(self, inputs: slice) -> None:
        """Zeroes the states of these inputs, which do not count until others are loaded."""
        for buffer in self.buffers.values():
            self._by_input(buffer)[inputs] = 0

    def reorder(self, parents: Tensor) -> None:
        """Has row r continue with the state of row `parents[r]`. Changes are in place, and may be captured."""
        for buffer in self.buffers.values():
            buffer.copy_(buffer.index_select(0, parents))

    def first(self, rows: int) -> dict[Name, Tensor]:
        """Returns copies of the states of the first rows."""
        return of_each(self.buffers, lambda buffer: buffer[:rows].clone())

    def _by_input(self, buffer: Tensor) -> Tensor:
        return buffer.unflatten(0, (self._batch, self._per_input))


def saved_states(states: Sequence[FixedStates]) -> Callable[[], None]:
    """Returns a function that restores the present contents of these states."""
    buffers = [buffer for each in states for buffer in each.buffers.values()]
    before = [buffer.clone() for buffer in buffers]

    def put_back() -> None:
        for buffer, state in zip(buffers, before, strict=True):
            buffer.copy_(state)

    return put_back
