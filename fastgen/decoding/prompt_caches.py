"""What requests with equal prompts share: K and V of prefixes, and encoder outputs of sources.

K and V are in a radix tree over blocks of tokens. A block holds `BLOCK` tokens that follow those of its parent, with K
and V of each layer. The least recently used blocks are evicted first, from the leaves of the tree. Like SGLang's
RadixAttention (Zheng et al., "SGLang", NeurIPS 2024, section 3), but with whole blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastgen.decoding.kv import Pair

BLOCK = 16


@dataclass(eq=False)
class _Block:
    parent: _Block | None
    tokens: tuple[Hashable, ...]
    layers: list[Pair]  # [1, heads, BLOCK, dim] each
    children: dict[tuple[Hashable, ...], _Block] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in self.layers for part in pair)


class PrefixCache:
    """The shared prefixes of one model in its present state. Not thread-safe.

    Prompts of different `kind` share nothing, whatever their tokens.

    Args:
        most_bytes: maximum size of K and V.

    Attributes:
        reused: number of positions that prompts have found here.
        nbytes: present size of K and V.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes, self.reused = most_bytes, 0, 0
        self._first: dict[tuple[Hashable, ...], _Block] = {}
        self._by_use: OrderedDict[_Block, None] = OrderedDict()  # the most recently used blocks are last

    def match(self, tokens: Sequence[int], kind: Hashable = None) -> int:
        """Returns how many of the first tokens are stored, leaving at least one token."""
        return len(self._found(tokens, kind)) * BLOCK

    def take(self, tokens: Sequence[int], kind: Hashable = None) -> list[Pair]:
        """Returns K and V of these tokens by layer, [1, heads, `match`, dim]; an empty list if none are stored."""
        found = self._found(tokens, kind)
        for block in reversed(found):  # a parent after its children, so that it is not evicted before them
            self._by_use.move_to_end(block)
        self.reused += len(found) * BLOCK
        by_layer = zip(*(block.layers for block in found), strict=True)
        return [_joined(pairs) for pairs in by_layer]

    def put(self, tokens: Sequence[int], layers: Sequence[Pair], kind: Hashable = None) -> None:
        """Stores K and V of a prompt, [1, heads, tokens, dim] each, in as many whole blocks as there is room for."""
        parent: _Block | None = None
        by_block = [(keys.split(BLOCK, dim=2), values.split(BLOCK, dim=2)) for keys, values in layers]
        of_block = BLOCK * sum(part[:, :, 0].nbytes for pair in layers for part in pair)
        for number, part in enumerate(_blocks(tokens, kind)[: self.most_bytes // of_block]):
            known = self._first if parent is None else parent.children
            block = known.get(part)
            if block is None:
                own = [(keys[number].clone(), values[number].clone()) for keys, values in by_block]
                block = _Block(parent, part, own)
                known[part] = block
                self.nbytes += block.nbytes
            self._by_use[block] = None
            parent = block
        while parent is not None:  # parents after their children, as in `take`
            self._by_use.move_to_end(parent)
            parent = parent.parent
        self._shrink()

    def clear(self) -> None:
        """Drops everything, because the model has changed."""
        self._first, self.nbytes = {}, 0
        self._by_use.clear()

    def _found(self, tokens: Sequence[int], kind: Hashable) -> list[_Block]:
        found: list[_Block] = []
        known = self._first
        for part in _blocks(tokens[:-1], kind):
            block = known.get(part)
            if block is None:
                break
            found.append(block)
            known = block.children
        return found

    def _shrink(self) -> None:
        while self.nbytes > self.most_bytes:
            oldest = next(iter(self._by_use))
            del self._by_use[oldest]
            del (self._first if oldest.parent is None else oldest.parent.children)[oldest.tokens]
            self.nbytes -= oldest.nbytes


def _blocks(tokens: Sequence[int], kind: Hashable) -> list[tuple[Hashable, ...]]:
    """Returns the keys of a prompt's blocks among the children of one parent. The first also contains the kind."""
    whole = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return [(*tokens[begin : begin + BLOCK], *([] if begin else [kind])) for begin in whole]


def _joined(pairs: Sequence[Pair]) -> Pair:
    keys, values = (torch.cat(parts, dim=2) for parts in zip(*pairs, strict=True))
    return keys, values


class Sources:
    """The encoder outputs of one model in its present state: a source is encoded once.

    Evicts the least recently used ones. Not thread-safe.

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
