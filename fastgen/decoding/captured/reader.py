"""How attention of a captured step reads a layer's K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.decoding.captured.step_state import StepState
from fastgen.decoding.captured.streams import StreamKV
from fastgen.decoding.shared import CannotBeCaptured, SharedKV
from fastgen.ops.triton.decode_attention import decode_attention


class StepReader:
    """What of a layer's buffers counts, and what a mask says beyond that.

    The lengths on the device leave out what is padding or not yet written. The masks that models build, from the sizes
    of the buffers, mostly say the same once more; then they are not read. Whether it is so is found out in a step that
    is not captured: while `host_may_wait` is set, a mask is compared with the lengths.

    Attributes:
        host_may_wait: the host may look at a mask, and wait for the device.
    """

    def __init__(self, starts: Tensor, ends: Tensor, state: StepState | None, window: int | None = None) -> None:
        """
        Args:
            starts, ends: [batch], int32: prefix positions that count are those in [start, end).
            state: where the step is in the suffix; None for a layer without a suffix.
            window: a query sees so many positions, its own included; None for all.
        """
        self._starts, self._ends, self._state, self._window = starts, ends, state, window
        self.host_may_wait = False
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
        """Attention of the step's queries, as `torch.nn.functional.scaled_dot_product_attention` has it.

        Args:
            query: [rows, heads, 1, dim], or [rows, kv heads, heads per kv head, dim]. Of a step that stores several
                positions: [rows, heads, positions, dim].
            prefix, suffix: K and V: [batch, kv heads, N, dim] and [rows, kv heads, capacity, dim].
            ancestry: [rows, capacity], int32, or None.
            mask: broadcastable to [*query.shape[:3], N + capacity]: bool (True counts), or added to the scores.

        Returns:
            [*query.shape[:3], dim of the values].
        """
        rows, heads, queries, dim = query.shape
        bias = self._bias(query, prefix[0], suffix[0], mask)
        if bias is None and self._width > 1:
            bias = self._state.order(heads, prefix[0].shape[2])
        context = decode_attention(
            query.reshape(rows, heads * queries, dim),
            *prefix,
            *suffix,
            starts=self._starts,
            ends=self._ends,
            suffix_length=None if self._state is None else self._state.filled,
            ancestry=ancestry,
            bias=bias,
            scale=scale,
            window=self._window,
        )
        return context.view(rows, heads, queries, -1)

    def leave_out(self, scores: Tensor, prefix: int) -> Tensor:
        """Scores that a model goes on with itself: what does not count is taken out, in place.

        A model without padding, or with a single query, may have no mask that does it.

        Args:
            scores: [rows, heads, queries, prefix + capacity].
        """
        counts = self._counts(prefix, scores.shape[-1] - prefix)
        self._check(scores.shape[2])
        counts = counts.repeat_interleave(scores.shape[0] // counts.shape[0], dim=0)
        return scores.masked_fill_(~counts[:, None], torch.finfo(scores.dtype).min)

    def with_own(self, shared: SharedKV, own: Tensor) -> Tensor:
        """K or V of one stream: `shared`, then its own, [rows, heads, own length, dim]. Nothing is copied."""
        return StreamKV.of(shared, [own], None)

    @property
    def _width(self) -> int:
        return 1 if self._state is None else self._state.width

    def _check(self, queries: int) -> None:
        """With one position per step, queries are heads of a group. With several there is one for each."""
        if self._width not in (1, queries):
            raise CannotBeCaptured(f"{queries} queries in a step that stores {self._width} positions")

    def _counts(self, prefix: int, capacity: int) -> Tensor:
        """[batch, width, prefix + capacity], bool: the positions that count for each position of the step."""
        device = self._starts.device
        place = torch.arange(prefix + capacity, device=device)
        counts = (place >= self._starts.unsqueeze(1)) & (place < self._ends.unsqueeze(1))
        if self._state is None:
            return counts.unsqueeze(1)
        # Its own place, and all of the suffix in front of it.
        own = torch.stack(self._state.positions).unsqueeze(1) + prefix
        seen = counts.unsqueeze(1) | ((place >= prefix) & (place <= own))
        return seen if self._window is None else seen & (place > own - self._window)

    def _bias(self, query: Tensor, prefix: Tensor, suffix: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores, [rows or 1, heads * queries or 1, N + capacity]; None if lengths say it all."""
        self._check(query.shape[2])
        if self.host_may_wait:
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
        visible = _visible(mask)
        batch, _, length, _ = prefix.shape
        counts = self._counts(length, capacity)
        if visible is None or mask.shape[-1] != counts.shape[2]:
            return False
        if visible.dim() != 4:
            visible = visible.expand(batch, 1, 1, -1)
        if visible.shape[0] != 1 and visible.shape[0] % batch:
            return False
        if self._width > 1 and visible.shape[2] != self._width:
            return False
        visible = visible.expand(max(visible.shape[0], batch), *visible.shape[1:])
        # An input that only fills the batch up counts for nothing, whatever a mask says of it.
        real = self._ends > self._starts
        by_input = visible.unflatten(0, (batch, -1)).flatten(1, 2)  # [batch, rows and heads, queries, positions]
        return bool(torch.where(real.view(-1, 1, 1, 1), by_input == counts.unsqueeze(1), True).all())


def _visible(mask: Tensor) -> Tensor | None:
    """What a mask lets through, bool; None for one that changes scores in other ways than taking them out."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool((hidden | (mask == 0)).all()) else None
