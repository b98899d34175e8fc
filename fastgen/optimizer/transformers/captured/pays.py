"""When recording pays: the one rule, for decode steps on the CPU, for what drafts need, and for passes of encoders.

Recording takes as long as some steps of the library's loop, and each step that is replayed saves a part of one. A call
records when what is left of it repays that. One that may end at any token is expected to be as long as others were;
where nothing is known, or others were too short, it first shows that it goes on. Where all calls are short, one of them
pays for the rest, once there were many.

What recording costs and what a step saves is measured on the way, in whole steps. A step for more rows is there before
one for these rows: until the rows that idle have cost as much as a recording, it does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastgen import caches, settings
from fastgen.optimizer.transformers.captured.key import Key

# A pass of an encoder of one shape is recorded when it has come so often: that takes as long as tens of passes.
PASSES = 64
# Calls with drafts have a step recorded once they have asked for so many; one that may end at any token counts as no
# more than the last.
ASKED_FOR, STEPS_OF_A_CALL = 256, settings.STEPS_OF_A_CALL
# So many steps repay a recording, as long as nothing has been measured, and at the least.
STEPS, LEAST_STEPS = 24, 6
# What specializing a recording takes of the time of making one, and in steps where none is measured; and one for any
# number of inputs takes the time of so many for one number.
PART_OF_SPECIALIZING, _RECORDINGS = 0.25, 2
STEPS_OF_SPECIALIZING = PART_OF_SPECIALIZING * STEPS
# At the most.
MOST_STEPS = 16 * STEPS
# The part of a step that a replay saves in most models. It counts as one more measurement: other work may have
# disturbed the first ones, and without another recording nobody would find out.
SAVED = 0.4
# A call that may end at any token is expected to go on once it has so many of them.
TOKENS_SEEN = 16
# Short calls have been many when their steps would have repaid so many recordings.
MANY = 4
# How much the last call counts in the average length of calls.
_WEIGHT = 0.25
# This part of the time of plain calls goes into what drafts need; and so many plain steps one such thing takes, as long
# as nobody knows.
SHARE, _STEPS_OF_ONE = 0.1, 20


def certain_tokens(config: Any, prompt: int, most: int) -> int:
    """Tokens behind a prompt of so many that a call generates whatever the model says, `most` at the most."""
    if config.max_time is not None or config.stop_strings is not None:
        return 1
    asked = max(config.min_new_tokens or 0, (config.min_length or 0) - prompt)
    return most if config.eos_token_id is None else min(asked, most)


def is_repeatable() -> bool:
    """Whether nothing may depend on the clock, nor on what calls before have left.

    Not the number of rows either, which decides about the bits of products.
    """
    return settings.current().captured_step == "always"


class Budget:
    """Of what is made little by little, in calls that do without it: a part of the time of the steps they ask for.

    Attributes:
        steps: that the calls so far have asked for.
    """

    def __init__(self) -> None:
        self.steps, self._seconds, self._last = 0, 0.0, 0.0

    def for_next(self, plain: float) -> float | None:
        """Seconds for the next thing, where a step of a plain call takes `plain`; None as long as there are too few."""
        expected = self._last or _STEPS_OF_ONE * plain
        return expected if self._seconds + expected <= SHARE * self.steps * plain else None

    def spend(self, seconds: float, is_typical: bool) -> None:
        """One thing was made in so many seconds, which the next one is likely to take if it `is_typical`."""
        self._seconds += seconds
        self._last = seconds if is_typical else self._last


@dataclass
class _OfKey:
    """What is known of the calls that agree on a key."""

    spent: int = 0  # steps that had no recording
    lost: float = 0.0  # seconds that they have lost for want of one
    budget: Budget = field(default_factory=Budget)  # of drafts


class Ledger:
    """What is known of one model.

    Attributes:
        recording: seconds that the last recording took.
        eager, replayed: seconds of a step by its number of rows.
    """

    _of: weakref.WeakKeyDictionary[Any, Ledger] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.recording: float | None = None
        self.eager: dict[int, float] = {}
        self.replayed: dict[int, float] = {}
        self._specializing: float | None = None
        self._keys: dict[Hashable, _OfKey] = {}
        self._tokens: float | None = None  # of calls that may end at any token, on the average

    @classmethod
    def of(cls, model: Any) -> Ledger:
        """That of a model."""
        return cls._of.setdefault(model, cls())

    def _of_key(self, key: Hashable) -> _OfKey:
        caches.limit(self._keys)
        return self._keys.setdefault(key, _OfKey())

    def starts_at(self, key: Key, certain: int, most: int, specializes: bool = False) -> int | None:
        """After how many steps of a call its step is to be recorded; None for not in this call.

        Args:
            certain: steps that the call will make whatever the model says.
            most: that it may make.
            specializes: there is a recording for any batch.
        """
        needed = self._repaid_by(key.rows, specializes)
        if self._of_key(key).spent >= MANY * needed or certain >= needed:
            return 0
        expected = self._expected(most)
        if expected >= needed:
            return 0
        # Nobody knows how long calls are, or they are short: this one has to show that it is not.
        seen = max(TOKENS_SEEN, int(min(needed, 2 * expected)))
        return seen if most - seen >= needed and most > certain else None

    def _expected(self, most: int) -> float:
        """Tokens of a call that may end at any of them."""
        return min(most, self._tokens) if self._tokens is not None else 0

    def with_more_rows(
        self, key: Key, others: Iterable[Key], certain: int, most: int, making: float | None
    ) -> Key | None:
        """The key among these whose step does for a call of `key`: with the fewest rows that idle.

        Args:
            others: of steps that are there, and differ in nothing but the number of inputs.
            certain, most: as of `starts_at`.
            making: seconds that a step of `key` would take to make; None where it would not be made at once.
        """
        larger = min(
            (other for other in others if other.batch > key.batch), key=lambda other: other.batch, default=None
        )
        if larger is None or larger.rows not in self.replayed or self.recording is None:
            return None
        if making is not None:
            steps = max(certain, self._expected(most))
            lost = self._of_key(key).lost + steps * self._idle(key.rows, larger.rows)
            return larger if lost < making else None
        eager = self.eager.get(min(self.eager, key=lambda rows: abs(rows - key.rows), default=0))
        return larger if eager is not None and self.replayed[larger.rows] < eager else None

    def note_idle(self, key: Key, larger: Key, steps: int) -> None:
        """A call of `key` has made so many steps of `larger`."""
        self.lose(key, steps * self._idle(key.rows, larger.rows))

    def lose(self, key: Hashable, seconds: float) -> float:
        """A call has lost so many seconds for want of a recording of this key. Returns those of all calls."""
        known = self._of_key(key)
        known.lost += seconds
        return known.lost

    def _idle(self, rows: int, larger: int) -> float:
        """Seconds that the rows more take in a step: at the most, as a step reads all weights whatever its rows."""
        fewer = (known for known in self.replayed if known <= rows)
        known = max(fewer, default=None)
        alone = self.replayed[larger] * rows / larger if known is None else self.replayed[known]
        return max(self.replayed[larger] - alone, 0.0)

    def making(self, specializes: bool) -> float:
        """Seconds that a step takes to make: to record, or to specialize where one was recorded for any number."""
        return self.specializing if specializes else self.recording or 0.0

    @property
    def specializing(self) -> float:
        """Seconds that it takes to specialize a step for another number of inputs, where one was recorded."""
        if self._specializing is not None:
            return self._specializing
        return PART_OF_SPECIALIZING * (self.recording or 0.0)

    def steps_of_specializing(self, seconds: float, is_recorded: bool = True) -> float:
        """What it takes to specialize a step for another number of inputs, in steps of so many seconds (0: not known).

        Args:
            is_recorded: there is a recording for any number of inputs.
        """
        taken = self.specializing if is_recorded else _RECORDINGS * (self.recording or 0.0)
        if not taken:
            return 0.0
        return taken / seconds if seconds else math.inf

    def note_specializing(self, seconds: float) -> None:
        """A step was specialized in so many seconds. Others may have had the processors meanwhile."""
        self._specializing = seconds if self._specializing is None else min(self._specializing, seconds)

    def note_eager(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long that was not replayed. Others may have had the processors meanwhile."""
        self.eager[rows] = min(self.eager.get(rows, seconds), seconds)

    def note_call(self, key: Key, tokens: int, may_end: bool, eager_steps: int) -> None:
        """A call of this key has generated so many tokens, with so many steps that were not replayed."""
        self._of_key(key).spent += eager_steps
        if may_end:
            before = tokens if self._tokens is None else self._tokens
            self._tokens = before + _WEIGHT * (tokens - before)

    def has_asked_for(self, key: Hashable, steps: int, needed: int) -> bool:
        """Whether calls of this key, the one that asks for these steps included, have asked for so many."""
        known = self._of_key(key)
        known.spent += steps
        return known.spent >= needed

    def budget(self, key: Hashable) -> Budget:
        """That of what the steps of this key need."""
        return self._of_key(key).budget

    def forget(self, key: Hashable | None = None) -> None:
        """The recording of this key is gone, or that of all: it has to pay again."""
        if key is None:
            self._keys.clear()
        else:
            self._keys.pop(key, None)

    def is_repaid(self, key: Hashable) -> None:
        """What calls have lost for want of this recording is no reason for another one."""
        self._of_key(key).lost = 0.0

    def _repaid_by(self, rows: int, specializes: bool) -> float:
        """Steps that repay a capture, from what is known of the number of rows that is nearest."""
        known = self.eager.keys() & self.replayed.keys()
        if self.recording is None or not known:
            return STEPS_OF_SPECIALIZING if specializes else STEPS
        nearest = min(known, key=lambda other: abs(other - rows))
        measured = max(1 - self.replayed[nearest] / self.eager[nearest], 0.0)
        saved = self.eager[nearest] * (len(known) * measured + SAVED) / (len(known) + 1)
        return min(max(self.making(specializes) / saved, LEAST_STEPS), MOST_STEPS)
