"""Drafts without a model: what followed the last tokens when they occurred before, in the prompt or the output.

From Saxena, "Prompt Lookup Decoding" (2023), which looks through all tokens at each step. Here an index of n-grams is
kept, so that a step costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Stands between texts of a row that do not follow one another. Nothing is drafted across it.
BOUNDARY = -1


class PromptLookup:
    """Drafts for the rows of a batch, each from its own tokens.

    The longest n-gram that occurs before is used. Where it occurs several times, the first occurrence is, as in
    Transformers' `PromptLookupCandidateGenerator`, or with `latest` the last one. A draft ends before `eos`: a token
    that ends the sequence is left to the model. From the first occurrence it also ends with what is there. The last
    occurrence may be nearer to the end than the draft is long. Then the draft goes on with itself, as in a loop.

    Args:
        rows: of the batch.
        max_ngram: the largest n.
        most: the tokens of a draft, at most.
        eos: tokens that end a sequence.
        latest: take the last occurrence.

    Raises:
        ValueError: `max_ngram` or `most` is less than one.
    """

    def __init__(
        self, rows: int, max_ngram: int = 2, most: int = 10, eos: Iterable[int] = (), latest: bool = False
    ) -> None:
        if max_ngram < 1 or most < 1:
            raise ValueError(f"an n-gram and a draft have at least one token, not {max_ngram} and {most}")
        self._max_ngram, self._most, self._latest = max_ngram, most, latest
        self._ends = frozenset((*eos, BOUNDARY))
        self._rows = [_Row(max_ngram) for _ in range(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, input_ids: Any, attention_mask: Any = None) -> None:
        """Appends prompts, [rows, length], without the padding, which may be on either side.

        Args:
            attention_mask: [rows, length], 0 for padding; None where there is none.
        """
        prompts = input_ids.tolist()
        masks = [[1] * len(prompt) for prompt in prompts] if attention_mask is None else attention_mask.tolist()
        for row, (prompt, mask) in enumerate(zip(prompts, masks, strict=True)):
            self.append(row, [token for token, is_there in zip(prompt, mask, strict=True) if is_there])

    def append(self, row: int, tokens: Iterable[int]) -> None:
        """Tokens that follow those of the row. `BOUNDARY` separates texts, as a source and its translation."""
        self._rows[row].append(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves these rows, in this order; the others are forgotten."""
        self._rows = [self._rows[row] for row in rows]

    def propose(
        self, row: int, most: int | None = None, allowed: Callable[[list[int]], int] | None = None
    ) -> list[int]:
        """A draft of what follows; empty if the last token occurs nowhere else.

        Args:
            most: tokens of the draft, at most, if less than that of the class.
            allowed: how many tokens of a draft may stand, from its beginning; for processors that ban tokens. Where
                none may, another occurrence is looked for.
        """
        limit = self._most if most is None else min(most, self._most)
        if limit < 1:
            return []
        for tokens in self._rows[row].occurrences(self._max_ngram, limit, self._latest):
            if allowed is not None:
                tokens = tokens[: allowed(tokens)]
                if not tokens:
                    continue
            return tokens[
                : next((position for position, token in enumerate(tokens) if token in self._ends), len(tokens))
            ]
        return []


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

    def occurrences(self, max_ngram: int, most: int, latest: bool) -> Iterable[list[int]]:
        """What followed the last n-gram each time, `most` tokens or less: longest n-grams first."""
        known = self._tokens
        end = len(known)
        for size in range(self._longest(min(max_ngram, end - 1)), 0, -1):
            positions = self._positions_of(size)
            # The last position is the end itself.
            for number in range(len(positions) - 2, -1, -1) if latest else range(len(positions) - 1):
                start = positions[number]
                tokens = known[start : start + most]
                while latest and len(tokens) < most:
                    tokens += tokens[len(tokens) - (end - start) :][: most - len(tokens)]
                yield tokens
