"""Texts of a padded batch, one behind the other in one row without the padding.

Everything that a Transformer's encoder computes per token then runs on the tokens alone; only attention has to know
where a text ends (Zeng et al., "Boosting Distributed Training Performance of the Unpadded BERT Model", 2022; Krell et
al., "Efficient Sequence Packing without Cross-contamination", 2021, arXiv 2107.02027).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import packed_attention


class Packing:
    """Where the tokens of a batch lie in the row.

    Texts of one length lie next to each other, so that attention takes them together, as a view.

    Attributes:
        mask: [texts, longest], bool: True for tokens, False for padding.
        lengths: of each text.
        total: tokens of all texts.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.lengths: list[int] = mask.sum(dim=1).tolist()
        self.total = sum(self.lengths)
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        texts, columns = mask[order].nonzero(as_tuple=True)
        self._places = torch.tensor(order)[texts] * mask.shape[1] + columns
        # Of texts with the same length: how many, and the length.
        runs = itertools.groupby(self.lengths[text] for text in order)
        self._runs = [(len(list(same)), length) for length, same in runs]
        self._in_row = torch.tensor([self.lengths[text] for text in order])

    def pack(self, x: Tensor) -> Tensor:
        """[texts, longest, ...] -> [1, total, ...]."""
        return x.flatten(0, 1).index_select(0, self._places).unsqueeze(0)

    def unpack(self, packed: Tensor, fill: float) -> Tensor:
        """[1, total, ...] -> [texts, longest, ...], with that number in the padding."""
        result = packed.new_full((self.mask.numel(), *packed.shape[2:]), fill)
        result.index_copy_(0, self._places, packed[0])
        return result.view(*self.mask.shape, *packed.shape[2:])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Attention within each text.

        Args:
            query, keys, values: [1, heads, total, dim], any floating dtype; a head of keys may serve several of query.

        Returns:
            [1, total, heads, dim of the values].
        """
        if packed_attention.serves(query, keys, values):
            return packed_attention.packed_attention(query[0], keys[0], values[0], self._in_row, scale).unsqueeze(0)
        has_groups = query.shape[1] != keys.shape[1]
        result = values.new_empty(1, self.total, query.shape[1], values.shape[3])
        begin = 0
        for texts, length in self._runs:
            q, k, v = (_of_texts(x, begin, texts, length) for x in (query, keys, values))
            context = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=has_groups)
            result[0, begin : begin + texts * length].view(texts, length, *result.shape[2:]).copy_(
                context.transpose(1, 2)
            )
            begin += texts * length
        return result


def attend_texts(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor | None:
    """Attention within each of several texts that are as long as each other, where FastGen's operator serves.

    Args:
        query, keys, values: [texts, heads, length, dim]; a head of keys may serve several of query.

    Returns:
        [texts, length, heads, dim of the values]; None where torch's attention is to run.
    """
    are_texts = query.dim() == keys.dim() == values.dim() == 4 and len(query) == len(keys) == len(values)
    if not are_texts or not query.numel() or not packed_attention.serves(query, keys, values):
        return None
    texts, _, length, _ = query.shape
    q, k, v = (packed_attention.as_row(x) for x in (query, keys, values))
    if q is None or k is None or v is None:
        return None
    lengths = torch.full((texts,), length, dtype=torch.int64, device="cpu")
    return packed_attention.packed_attention(q, k, v, lengths, scale).unflatten(0, (texts, length))


def _of_texts(x: Tensor, begin: int, texts: int, length: int) -> Tensor:
    """[1, heads, total, dim] -> [texts, heads, length, dim], a view."""
    part = x[0, :, begin : begin + texts * length]
    return part.unflatten(1, (texts, length)).transpose(0, 1)
