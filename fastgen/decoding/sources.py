"""A cache of encoder outputs: a source is encoded once, however many requests have it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Sources:
    """The encoder outputs of one model in its present state. Evicts the least recently used ones. Not thread-safe.

    Args:
        most_bytes: maximum size of the encoder outputs.
        are_current: returns whether they are those of the model in its present state, and clears them if not.

    Attributes:
        kind: the class of the library's encoder outputs; set by the code that encodes.
        reused: number of sources that did not have to be encoded.
    """

    def __init__(self, most_bytes: int, are_current: Callable[[], bool] = lambda: True) -> None:
        self.most_bytes, self.nbytes, self.reused = most_bytes, 0, 0
        self._are_current = are_current
        self.kind: Any = None
        self._known: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()  # [length, size] each

    def clear(self) -> None:
        self._known.clear()
        self.nbytes = 0

    def encode(
        self, run: Callable[[Tensor, Tensor], Tensor], ids: Tensor, mask: Tensor, kind: Hashable = None
    ) -> Tensor:
        """Returns the encoder output, [batch, longest, size], of sources, with zeros for padding.

        Args:
            run: encodes rows, given their tokens and their mask, with padding on the right.
            ids: [batch, longest], int64.
            mask: [batch, longest]: 1 for tokens, 0 for padding on the right.
            kind: sources of different kinds are different, whatever their tokens.
        """
        real = mask.bool()
        keys = [(kind, *row[is_real].tolist()) for row, is_real in zip(ids, real, strict=True)]
        found = {key: self._known[key] for key in keys if key in self._known}
        if found and not self._are_current():
            found = {}
        new = dict.fromkeys(key for key in keys if key not in found)
        self.reused += len(keys) - len(new)
        if new:
            rows = [torch.tensor(key[1:]) for key in new]
            masks = [torch.ones_like(row, dtype=mask.dtype) for row in rows]
            states = run(pad_sequence(rows, True), pad_sequence(masks, True))
            found |= {key: state[: len(key) - 1].clone() for key, state in zip(new, states, strict=True)}
        state = found[keys[0]]
        encoded = state.new_zeros(*ids.shape, state.shape[-1])
        for row, key in enumerate(keys):
            encoded[row, real[row]] = found[key]
        for key, state in found.items():
            self._keep(key, state)
        return encoded

    def _keep(self, key: tuple[Hashable, ...], state: Tensor) -> None:
        if key not in self._known:
            self._known[key] = state
            self.nbytes += state.nbytes
        self._known.move_to_end(key)
        while self.nbytes > self.most_bytes:
            self.nbytes -= self._known.popitem(last=False)[1].nbytes
