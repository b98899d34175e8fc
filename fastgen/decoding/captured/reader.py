"""How attention of a captured step reads a layer's K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.triton.decode_attention import decode_attention


class StepReader:
    """What of a layer's buffers counts, and what a mask says beyond that.

    The lengths on the device leave out what is padding or not yet written. The masks that models build, from the sizes
    of the buffers, mostly say the same once more; then they are not read. Whether it is so is found out in a step that
    is not captured: while `looks` is set, a mask is compared with the lengths.

    Attributes:
        looks: the host may look at a mask, and wait for it.
    """

    def __init__(self, starts: Tensor, ends: Tensor, filled: Tensor | None) -> None:
        """
        Args:
            starts, ends: [batch], int32: prefix positions that count are those in [start, end).
            filled: one int64: suffix positions that count; None for a layer without a suffix.
        """
        self._starts, self._ends, self._filled = starts, ends, filled
        self.looks = False
        self._says_nothing_new: bool | None = None

    def attend(
        self,
        query: Tensor,
        prefix: tuple[Tensor, Tensor],
        suffix: tuple[Tensor | None, Tensor | None],
        ancestry: Tensor | None,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Attention of one query per row, as `torch.nn.functional.scaled_dot_product_attention` has it.

        Args:
            query: [rows, heads, 1, dim], or [rows, kv heads, heads per kv head, dim].
            prefix, suffix: K and V: [batch, kv heads, N, dim] and [rows, kv heads, capacity, dim].
            ancestry: [rows, capacity], int32, or None.
            mask: broadcastable to [*query.shape[:3], N + capacity]: bool (True counts), or added to the scores.

        Returns:
            [*query.shape[:3], dim of the values].
        """
        rows, heads, queries, dim = query.shape
        context = decode_attention(
            query.reshape(rows, heads * queries, dim),
            *prefix,
            *suffix,
            starts=self._starts,
            ends=self._ends,
            suffix_length=self._filled,
            ancestry=ancestry,
            bias=self._bias(query, prefix[0], suffix[0], mask),
            scale=scale,
        )
        return context.view(rows, heads, queries, -1)

    def leave_out(self, scores: Tensor, prefix: int) -> Tensor:
        """Scores that a model goes on with itself: what does not count is taken out, in place.

        A model without padding, or with a single query, may have no mask that does it.

        Args:
            scores: [rows, heads, queries, prefix + capacity].
        """
        counts = self._counts(prefix, scores.shape[-1] - prefix)
        counts = counts.repeat_interleave(scores.shape[0] // counts.shape[0], dim=0)
        return scores.masked_fill_(~counts[:, None, None], torch.finfo(scores.dtype).min)

    def _counts(self, prefix: int, capacity: int) -> Tensor:
        """[batch, prefix + capacity], bool: the positions that count."""
        place = torch.arange(prefix, device=self._starts.device)
        counts = (place >= self._starts.unsqueeze(1)) & (place < self._ends.unsqueeze(1))
        if capacity and self._filled is not None:
            written = torch.arange(capacity, device=self._starts.device) < self._filled
            counts = torch.cat([counts, written.expand(len(counts), capacity)], dim=1)
        return counts

    def _bias(self, query: Tensor, prefix: Tensor, suffix: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """[rows or 1, heads or 1, N + capacity]: what is added to the scores; None where the lengths say it all."""
        if self.looks:
            # A mask that is left out because everything counts is made all the same where the host may not look at it.
            capacity = 0 if suffix is None else suffix.shape[2]
            self._says_nothing_new = mask is None or self._equals_lengths(mask, prefix, capacity)
        if mask is None or self._says_nothing_new:
            return None
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        if mask.shape[1:3] == (1, 1):
            return mask[:, :, 0]
        return mask.expand(-1, *query.shape[1:3], -1).flatten(1, 2)

    def _equals_lengths(self, mask: Tensor, prefix: Tensor, capacity: int) -> bool:
        if mask.dtype != torch.bool:
            return False
        batch, _, length, _ = prefix.shape
        counts = self._counts(length, capacity)
        if mask.shape[-1] != counts.shape[1] or (mask.dim() == 4 and mask.shape[0] % batch and mask.shape[0] != 1):
            return False
        # An input that only fills the batch up counts for nothing, whatever a mask says of it.
        real = self._ends > self._starts
        rows = (
            mask.expand(max(mask.shape[0], batch), *mask.shape[1:]) if mask.dim() == 4 else mask.expand(batch, 1, 1, -1)
        )
        by_input = rows.reshape(batch, -1, counts.shape[1])
        return bool(torch.where(real.view(-1, 1, 1), by_input == counts.unsqueeze(1), True).all())
