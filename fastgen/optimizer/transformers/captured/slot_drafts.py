"""What is drafted for an input of a step with slots: what the form of its result forces, or what it repeats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from fastgen.decoding.speculation.prompt_lookup import BOUNDARY, PromptLookup
from fastgen.decoding.speculation.verify_rows import Chance
from fastgen.optimizer.transformers.captured.forms import FormProcessor

# Tokens of a draft, at the most: their chances multiply.
MOST = 15
# How likely a token is to be right, as long as nobody knows: where the form of the result forces it, unless the model
# writes the same text with other tokens; and behind so many tokens that have occurred before.
_FORCED, _FOUND = 0.9, (0.1, 0.3, 0.6)


class Chances:
    """How likely drafted tokens are to be right.

    Attributes:
        forced: those that the form of a result forces.
        found: those behind one token that has occurred before, behind two, and so on.
    """

    def __init__(self) -> None:
        self.forced, self.found = Chance(_FORCED), [*map(Chance, _FOUND)]

    def of_input(self) -> Chances:
        """Those of one input more, which begin with what is known of others."""
        made = Chances()
        made.forced, made.found = self.forced.of_input(), [each.of_input() for each in self.found]
        return made


class SlotDrafts:
    """The drafts of an input, one after the other.

    Args:
        most: tokens of a draft that is found in the text; 0 for none.
        max_ngram: tokens that must have occurred before, at the most.
        source: tokens that an encoder has read.
        eos: tokens that end a sequence.
        chances: of all inputs.
    """

    def __init__(self, most: int, max_ngram: int, source: Iterable[int], eos: Iterable[int], chances: Chances) -> None:
        self._most, self._eos, self._chances = min(most, MOST), frozenset(eos), chances.of_input()
        self._lookup = PromptLookup(1, max_ngram, self._most, self._eos)
        self.append([*source, BOUNDARY])

    def append(self, tokens: Iterable[int]) -> None:
        """Tokens that follow those of the sequence."""
        if self._most:
            self._lookup.append(0, tokens)

    def propose(self, form: FormProcessor | None, tokens: Tensor | None) -> tuple[list[int], Chance]:
        """What may come behind the sequence, and how likely each of these tokens is to be right.

        Args:
            form: of its result, if there is one.
            tokens: the sequence then, [length].
        """
        forced = [] if form is None or tokens is None else form.forced(tokens)[:MOST]
        if forced := list(itertools.takewhile(lambda token: token not in self._eos, forced)):
            return forced, self._chances.forced
        found, size = self._lookup.propose_behind(0, self._most) if self._most else ([], 0)
        return found, self._chances.found[min(max(size, 1), len(self._chances.found)) - 1]
