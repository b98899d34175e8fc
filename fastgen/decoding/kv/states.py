"""States of a layer that are no K and V: of linear attention, or of a short convolution.

A state has one size, however long the sequences are. It cannot go back: each step writes over what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

# Which state of a layer: its kind, and its number among those of the kind.
Name = tuple[str, int]
States = Mapping[Name, Tensor]
"""Those of a layer, [rows, ...] each."""


def of_each(states: States, function: Callable[[Tensor], Tensor]) -> dict[Name, Tensor]:
    """What the function makes of each state."""
    return {name: function(state) for name, state in states.items()}


class FixedStates:
    """The states of a layer in buffers that stay where they are: a captured step changes them in place.

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
        """Takes over what the prefill has left, [inputs, ...] each. Those of `inputs` that are left over have zeros."""
        self.leave(inputs)
        for name, buffer in self.buffers.items():
            part = self._by_input(buffer)[inputs]
            part[: states[name].shape[0]] = states[name].unsqueeze(1)

    def insert(self, other: FixedStates, source: Tensor | slice, target: slice) -> None:
        """Has inputs go on at `target` that are `source` in `other`."""
        for name, buffer in self.buffers.items():
            self._by_input(buffer)[target] = other._by_input(other.buffers[name])[source]

    def leave(self, inputs: slice) -> None:
        """Nothing counts of these inputs until others are loaded."""
        for buffer in self.buffers.values():
            self._by_input(buffer)[inputs] = 0

    def reorder(self, parents: Tensor) -> None:
        """Row r goes on with the state of row `parents[r]`. Changes all in place, and may be captured."""
        for buffer in self.buffers.values():
            buffer.copy_(buffer.index_select(0, parents))

    def first(self, rows: int) -> dict[Name, Tensor]:
        """A copy of those of the first rows."""
        return of_each(self.buffers, lambda buffer: buffer[:rows].clone())

    def _by_input(self, buffer: Tensor) -> Tensor:
        return buffer.unflatten(0, (self._batch, self._per_input))


def saved(states: Sequence[FixedStates]) -> Callable[[], None]:
    """Returns what puts them back to what they are now."""
    buffers = [buffer for each in states for buffer in each.buffers.values()]
    before = [buffer.clone() for buffer in buffers]

    def put_back() -> None:
        for buffer, state in zip(buffers, before, strict=True):
            buffer.copy_(state)

    return put_back
