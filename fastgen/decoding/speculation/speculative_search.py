"""A search whose rows advance by several tokens at once: the accepted tokens of a draft, and one more."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.captured.search import Search
from fastgen.decoding.speculation.acceptance import accept_greedy
from fastgen.interrupts import cached_property
from fastgen.ops import search_step


class Progress(NamedTuple):
    """The state of a search as the host reads it, with one number for each row."""

    done: bool
    unfinished: list[bool]
    lengths: list[int]

    @property
    def rows(self) -> list[int]:
        """The unfinished rows."""
        return [row for row, goes_on in enumerate(self.unfinished) if goes_on]


class SpeculativeSearch(Search):
    """A search in which each row takes the accepted tokens of its draft, and the token after them.

    Drafted tokens are written after the ends of the running sequences, where code that reads the tokens so far finds
    them. `commit` leaves padding there.

    Args:
        width: the most tokens that a row takes at once.
        together: all unfinished rows take the same number of tokens, because the model has one position for all rows.
    """

    def __init__(self, *sizes: Any, width: int, together: bool, **options: Any) -> None:
        batch, per_input, prompt_capacity, new_capacity, *rest = sizes
        super().__init__(batch, per_input, prompt_capacity, new_capacity + width, *rest, **options)
        self._together = together

    def progress(self) -> Progress:
        """Returns the progress of the search. Waits for the device."""
        done, unfinished, lengths, _ = self._on_host
        return Progress(bool(done), unfinished.tolist(), lengths.tolist())

    def tokens_of(self, row: int, begin: int, end: int) -> list[int]:
        """Returns the tokens of a row between two positions. Waits for the device."""
        found: list[int] = self._on_host[3][row, begin:end].tolist()
        return found

    @cached_property
    def _on_host(self) -> tuple[Any, ...]:
        """The buffers that the host reads in each iteration; on a CPU as arrays, which takes a tenth of the time."""
        buffers = self.done, self.unfinished.view(-1), self.length.view(-1), self.running_tokens
        return tuple(buffer.numpy() for buffer in buffers) if self.done.device.type == "cpu" else buffers

    def following(self, first: Tensor | int, count: int) -> Tensor:
        """Returns [rows, count]: the tokens of each row from its last one on, skipping `first` of them.

        Negative numbers begin before the last token. Positions before the prompt get its first token.
        """
        at = self.length.view(-1, 1) - 1 + first + self._positions[:count]
        return self.running_tokens.gather(1, torch.maximum(at, self.start.view(-1, 1)))

    def draft(self, tokens: Tensor, ahead: Tensor) -> None:
        """Writes drafted tokens, [rows], after the `ahead` tokens that are already drafted."""
        self.running_tokens.scatter_(1, self.length.view(-1, 1) + ahead, tokens.unsqueeze(1))

    def cut(self, rows: Tensor, length: int) -> None:
        """Ends some rows, [rows], bool, at this length, and pads what comes after it."""
        self.taken.copy_(self._by_input(torch.where(rows, length - self.length.view(-1), 0)))
        self.length.add_(self.taken)
        is_behind = (self._positions >= length) & rows.unsqueeze(1)
        self.running_tokens.copy_(torch.where(is_behind, self._fill.unsqueeze(1), self.running_tokens))
        self.unfinished.logical_and_(~self._by_input(rows))
        self.done.logical_or_(~self.unfinished.any())

    def put_back(self, larger: SpeculativeSearch, inputs: Tensor) -> None:
        """Writes the state of this search back to `larger`, from which it has taken over these inputs."""
        for name, buffer in vars(self).items():
            if isinstance(buffer, Tensor):
                old = getattr(larger, name)
                if old.shape == buffer.shape:
                    old.copy_(buffer)
                else:
                    old.view(larger._batch, -1)[inputs] = buffer.view(self._batch, -1)

    def commit(
        self, chosen: Tensor, counts: Tensor | None, accepted: Tensor, near: Tensor | None, near_ties: Tensor
    ) -> None:
        """Continues with the first `accepted` + 1 of the tokens in `chosen`, up to an end token or the limit.

        Finished sequences do not change.

        Args:
            chosen: [rows, width], int64.
            counts: [rows], int64: how many tokens are drafted. If given, `accepted` is computed as in `accept_greedy`.
            accepted: [rows], int64.
            near, near_ties: [rows, width], bool, and an int64 scalar, to which those of the taken tokens are added.
        """
        if search_step.available(chosen):
            torch.ops.fastgen.commit_(
                chosen, counts, accepted, near, near_ties, self._eos, self._fill, self.limit, self.has_nan,
                self.running_sequences, self.tokens, self.length, self.taken, self.unfinished, self.done,
                self._together,
            )  # fmt: skip
            return
        width = chosen.shape[1]
        if counts is not None:
            accepted.copy_(accept_greedy(self.following(1, width - 1), chosen, counts))
        steps = self._positions[:width]
        ends = (chosen.unsqueeze(2) == self._eos).any(dim=2)
        # The number of tokens up to and including the first that ends the sequence.
        before_end = (ends.long().cumsum(dim=1) - ends.long() == 0).sum(dim=1)
        count = torch.minimum(accepted + 1, before_end)
        length, limit = self.length.view(-1), self.limit.view(-1)
        unfinished = self.unfinished.view(-1) & ~self.done
        count = torch.minimum(count, limit - length)
        if self._together:
            has_ended = (ends & (steps < count.unsqueeze(1))).any(dim=1)
            others = torch.where(unfinished & ~has_ended, count, width)
            count = torch.minimum(count, others.amin())
        count = torch.where(unfinished, count, 0)
        has_ended = (ends & (steps < count.unsqueeze(1))).any(dim=1) | (length + count >= limit)

        offset = self._positions - length.unsqueeze(1)
        written = chosen.gather(1, offset.clamp(0, width - 1))
        behind = torch.where(offset < count.unsqueeze(1), written, self._fill.unsqueeze(1))
        tokens = self.running_tokens
        tokens.copy_(torch.where(offset < 0, tokens, behind))
        if near is not None:
            near_ties.add_((near & (steps < count.unsqueeze(1))).sum())
        self.taken.copy_(self._by_input(count))
        self.length.add_(self.taken)
        self.tokens.copy_(self.following(0, 1).squeeze(1))
        self.unfinished.logical_and_(~self._by_input(has_ended))
        over = ~self.unfinished.any()
        self.done.logical_or_(over | self.has_nan if self._samples else over)
