"""Drafts without a model: what followed the last tokens when they occurred before, in the prompt or the output.

From Saxena, "Prompt Lookup Decoding" (2023), which looks through all tokens at each step. Here an index of n-grams is
kept, so that a step costs the same however long the text is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

# Stands between texts of a row that do not follow one another. Nothing is drafted across it.
BOUNDARY = -1


class PromptLookup:
    """Drafts for the rows of a batch, each from its own tokens.

    The longest n-gram that occurs before is used. Where it occurs several times, the last occurrence is: Transformers'
    `PromptLookupCandidateGenerator` takes the first, which is less often right. That may be nearer to the end than the
    draft is long. Then the draft goes on with itself, as in a loop. It ends before `eos`: a token that ends the
    sequence is left to the model.

    Args:
        rows: of the batch.
        max_ngram: the largest n, at least 1.
        most: the tokens of a draft, at most.
        eos: tokens that end a sequence.
    """

    def __init__(self, rows: int, max_ngram: int, most: int, eos: Iterable[int] = ()) -> None:
        self._max_ngram, self._most = max_ngram, most
        self._ends = frozenset((*eos, BOUNDARY))
        self._rows = [_Row(max_ngram) for _ in range(rows)]

    def append(self, row: int, tokens: Iterable[int]) -> None:
        """Tokens that follow those of the row. `BOUNDARY` separates texts, as a source and its translation."""
        self._rows[row].append(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves these rows, in this order; the others are forgotten."""
        self._rows = [self._rows[row] for row in rows]

    def propose(self, row: int, most: int) -> list[int]:
        """A draft of what follows, of `most` tokens at the most; empty if the last token occurs nowhere else."""
        return self.propose_behind(row, most)[0]

    def propose_behind(self, row: int, most: int) -> tuple[list[int], int]:
        """The same, and how many tokens in front of it have occurred before; 0 if the last one has not."""
        tokens, size = self._rows[row].followed(self._max_ngram, min(most, self._most))
        return list(itertools.takewhile(lambda token: token not in self._ends, tokens)), size


# Larger n-grams are looked for among the positions of those: each size that is indexed takes memory for every token.
_MOST_INDEXED = 16


class _Row:
    """Tokens, and for each n from 1 to a few the positions behind each n-gram, in order."""

    def __init__(self, max_ngram: int) -> None:
        self._tokens: list[int] = []
        self._positions: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(min(max_ngram, _MOST_INDEXED))]

    def append(self, tokens: Iterable[int]) -> None:
        known = self._tokens
        for token in tokens:
            known.append(token)
            end = len(known)
            for size, positions in enumerate(self._positions[:end], 1):
                positions.setdefault(tuple(known[end - size :]), []).append(end)

    def _positions_of(self, size: int) -> list[int]:
        """The positions behind each n-gram like the last one, in order."""
        known, indexed = self._tokens, min(size, len(self._positions))
        end = len(known)
        positions = self._positions[indexed - 1][tuple(known[end - indexed :])]
        if indexed == size or len(positions) == 1:  # the end itself
            return positions
        last = known[end - size :]
        return [position for position in positions if position >= size and known[position - size : position] == last]

    def _longest(self, most: int) -> int:
        """A size that no n-gram like the last one, which has occurred before, is above; `most` at the most."""
        known = self._tokens
        if most <= len(self._positions):
            return most
        end, found = len(known), len(self._positions)
        for position in self._positions_of(found)[:-1]:
            while found < min(most, position) and known[position - found - 1 : position] == known[end - found - 1 :]:
                found += 1
        return found

    def followed(self, max_ngram: int, most: int) -> tuple[list[int], int]:
        """`most` tokens that followed the longest n-gram that has occurred before, the last time; and n."""
        known = self._tokens
        for size in range(self._longest(min(max_ngram, len(known) - 1)), 0, -1) if most > 0 else ():
            positions = self._positions_of(size)
            if len(positions) > 1:  # the last one is the end itself
                found = known[positions[-2] : positions[-2] + most]
                return (found * -(-most // len(found)))[:most], size
        return [], 0
