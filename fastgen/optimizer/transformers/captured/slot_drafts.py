"""Drafts for an input of a step with slots: tokens that the form of its result forces, or that repeat its text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from fastgen.decoding.speculation.prompt_lookup import BOUNDARY, PromptLookup
from fastgen.decoding.speculation.verify_rows import Chance
from fastgen.optimizer.transformers.captured.forms import FormProcessor

# Maximum number of tokens of a draft: their probabilities multiply.
MOST = 15
# Initial probabilities that a token is right: if the form of the result forces it, as the model may write the same
# text with other tokens; and after one, two, or three tokens that have occurred before.
_FORCED, _FOUND = 0.9, (0.1, 0.3, 0.6)


class Chances:
    """The probabilities that drafted tokens are right.

    Attributes:
        forced: of tokens that the form of a result forces.
        found: of tokens after one token that has occurred before, after two, and so on.
    """

    def __init__(self) -> None:
        self.forced, self.found = Chance(_FORCED), [*map(Chance, _FOUND)]

    def of_input(self) -> Chances:
        """Returns those of another input, which begin with what is known of all inputs."""
        made = Chances()
        made.forced, made.found = self.forced.of_input(), [each.of_input() for each in self.found]
        return made


class SlotDrafts:
    """The drafts of an input, one after the other.

    Args:
        most: maximum number of tokens of a draft found in the text; 0 for none.
        max_ngram: maximum number of tokens to find in the earlier text.
        source: the tokens of the encoder's input.
        eos: tokens that end a sequence.
        chances: of all inputs.
    """

    def __init__(self, most: int, max_ngram: int, source: Iterable[int], eos: Iterable[int], chances: Chances) -> None:
        self._most, self._eos, self._chances = min(most, MOST), frozenset(eos), chances.of_input()
        self._lookup = PromptLookup(1, max_ngram, self._most, self._eos)
        self.append([*source, BOUNDARY])

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the sequence."""
        if self._most:
            self._lookup.append(0, tokens)

    def propose(self, form: FormProcessor | None, tokens: Tensor | None) -> tuple[list[int], Chance]:
        """Returns tokens that may follow the sequence, and the probability that each of them is right.

        Args:
            form: of the input's result, if it has one.
            tokens: the input's sequence, [length], if it has a form.
        """
        forced = [] if form is None or tokens is None else form.forced(tokens)[:MOST]
        if forced := list(itertools.takewhile(lambda token: token not in self._eos, forced)):
            return forced, self._chances.forced
        found, size = self._lookup.propose_behind(0, self._most) if self._most else ([], 0)
        return found, self._chances.found[min(max(size, 1), len(self._chances.found)) - 1]
