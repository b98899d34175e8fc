"""Drafts without a model: the tokens that followed an earlier occurrence of the last tokens, in prompt or output.

From Saxena, "Prompt Lookup Decoding" (2023), which searches all tokens at each step. Here, an index of n-grams makes
the cost of a step independent of the length of the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

# Separates texts of a row that do not follow one another. No draft crosses it.
BOUNDARY = -1


class PromptLookup:
    """Drafts for the rows of a batch, each from its own tokens.

    The longest n-gram that has occurred before is used, at its last occurrence. Transformers'
    `PromptLookupCandidateGenerator` uses the first, which is less often right. If fewer tokens follow the occurrence
    than the draft is long, the draft continues with its own beginning, as in a loop. It ends before `eos`: a token that
    ends the sequence is left to the model.

    Args:
        rows: number of rows of the batch.
        max_ngram: the largest n, at least 1.
        most: the maximum number of tokens of a draft.
        eos: tokens that end a sequence.
    """

    def __init__(self, rows: int, max_ngram: int, most: int, eos: Iterable[int] = ()) -> None:
        self._max_ngram, self._most = max_ngram, most
        self._ends = frozenset((*eos, BOUNDARY))
        self._rows = [_Row(max_ngram) for _ in range(rows)]

    def append(self, row: int, tokens: Iterable[int]) -> None:
        """Appends tokens to a row. `BOUNDARY` separates texts, such as a source and its translation."""
        self._rows[row].append(tokens)

    def propose(self, row: int, most: int) -> list[int]:
        """Returns a draft of at most `most` following tokens; empty if the last token occurs nowhere else."""
        return self.propose_behind(row, most)[0]

    def propose_behind(self, row: int, most: int) -> tuple[list[int], int]:
        """Returns the same, and how many tokens before it have occurred before; 0 if the last one has not."""
        tokens, size = self._rows[row].followed(self._max_ngram, min(most, self._most))
        return list(itertools.takewhile(lambda token: token not in self._ends, tokens)), size


# Larger n-grams are searched for at the positions of these, because each indexed size takes memory for every token.
_MOST_INDEXED = 16


class _Row:
    """Tokens, and for each n from 1 to a few the positions after each n-gram, in order."""

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
        """Returns the positions after each occurrence of the last n-gram of this size, in order."""
        known, indexed = self._tokens, min(size, len(self._positions))
        end = len(known)
        positions = self._positions[indexed - 1][tuple(known[end - indexed :])]
        if indexed == size or len(positions) == 1:  # the only position is the end itself
            return positions
        last = known[end - size :]
        return [position for position in positions if position >= size and known[position - size : position] == last]

    def _longest(self, most: int) -> int:
        """Returns an upper bound, at most `most`, for the size of the last n-grams that have occurred before."""
        known = self._tokens
        if most <= len(self._positions):
            return most
        end, found = len(known), len(self._positions)
        for position in self._positions_of(found)[:-1]:
            while found < min(most, position) and known[position - found - 1 : position] == known[end - found - 1 :]:
                found += 1
        return found

    def followed(self, max_ngram: int, most: int) -> tuple[list[int], int]:
        """Returns the `most` tokens after the last earlier occurrence of the longest known n-gram; and n."""
        known = self._tokens
        for size in range(self._longest(min(max_ngram, len(known) - 1)), 0, -1) if most > 0 else ():
            positions = self._positions_of(size)
            if len(positions) > 1:  # the last position is the end itself
                found = known[positions[-2] : positions[-2] + most]
                return (found * -(-most // len(found)))[:most], size
        return [], 0
