"""The one rule for when recording pays: for decode steps on a CPU, for drafts, and for encoder passes.

Recording takes as long as some steps of the library's loop, and each replayed step saves a part of one. A call records
if the rest of the call repays that. A call that may end at any token is expected to be as long as earlier ones. If
nothing is known, or earlier calls were too short, the call first has to go on for some tokens. If all calls are short,
one of them pays for the rest, once there have been many.

The cost of recording and the savings of a step are measured in users' calls, in whole steps. If a step for more rows
exists, it serves calls of fewer rows until its idle rows have cost as much as another recording.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastgen import memory, settings
from fastgen.optimizer.transformers.captured.key import Key

# An encoder pass of one shape is recorded once it has run this often: recording takes as long as tens of passes.
PASSES = 64
# Calls with drafts have a step recorded once they have asked for this many steps. A call that may end at any token
# counts for at most the second number.
ASKED_FOR, STEPS_OF_A_CALL = 256, settings.STEPS_OF_A_CALL
# Steps that repay a recording: the number assumed before anything has been measured, and the least number.
STEPS, LEAST_STEPS = 24, 6
# Part of a recording's time that specializing it takes, until that is measured. A recording for any number of inputs
# takes the time of this many for one number. The third is the time of specializing in steps, if nothing was measured.
PART_OF_SPECIALIZING, _RECORDINGS = 0.25, 2
STEPS_OF_SPECIALIZING = PART_OF_SPECIALIZING * STEPS
# The most steps that repay a recording.
MOST_STEPS = 16 * STEPS
# The part of a step that a replay saves in most models. It counts as one additional measurement: other processes may
# have disturbed the first ones, and without another recording nothing would correct these.
SAVED = 0.4
# A call that may end at any token is expected to go on once it has this many tokens.
TOKENS_SEEN = 16
# Short calls have been many once their steps would have repaid this many recordings.
MANY = 4
# Weight of the last call in the moving average of call lengths.
_WEIGHT = 0.25
# The part of the time of plain calls that may be spent on preparing drafts, and the assumed cost of one such item in
# plain steps, until it has been measured.
SHARE, _STEPS_OF_ONE = 0.1, 20


def certain_tokens(config: Any, prompt: int, most: int) -> int:
    """Returns how many tokens after a prompt of this length a call generates whatever the model predicts."""
    if config.max_time is not None or config.stop_strings is not None:
        return 1
    asked = max(config.min_new_tokens or 0, (config.min_length or 0) - prompt)
    return most if config.eos_token_id is None else min(asked, most)


def is_repeatable() -> bool:
    """Whether nothing may depend on the clock or on what earlier calls have left.

    This includes the number of rows that a step computes, which affects the bits of matrix products.
    """
    return settings.current().captured_step == "always"


class Budget:
    """The time budget of items that are made one at a time, in calls that do without them: a part of their steps' time.

    Attributes:
        steps: steps that the calls so far have asked for.
    """

    def __init__(self) -> None:
        self.steps, self._seconds, self._last = 0, 0.0, 0.0

    def for_next(self, plain: float) -> float | None:
        """Returns the expected seconds of the next item, or None if there is no budget. A plain step takes `plain`."""
        expected = self._last or _STEPS_OF_ONE * plain
        return expected if self._seconds + expected <= SHARE * self.steps * plain else None

    def spend(self, seconds: float, is_typical: bool) -> None:
        """Notes the seconds that one item took. The next one is expected to take as long if this one `is_typical`."""
        self._seconds += seconds
        self._last = seconds if is_typical else self._last


@dataclass
class _OfKey:
    """What is known of the calls of one key."""

    spent: int = 0  # steps that ran without a recording
    lost: float = 0.0  # seconds that calls have lost for want of a recording
    budget: Budget = field(default_factory=Budget)  # of drafts


class Ledger:
    """What is known about the times and lengths of one model's calls.

    Attributes:
        recording: seconds that the last recording took.
        eager, replayed: seconds of a step, by its number of rows.
    """

    _of: weakref.WeakKeyDictionary[Any, Ledger] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.recording: float | None = None
        self.eager: dict[int, float] = {}
        self.replayed: dict[int, float] = {}
        self._specializing: float | None = None
        self._keys: dict[Hashable, _OfKey] = {}
        self._tokens: float | None = None  # average length of calls that may end at any token

    @classmethod
    def of(cls, model: Any) -> Ledger:
        """Returns the ledger of a model."""
        return cls._of.setdefault(model, cls())

    def _of_key(self, key: Hashable) -> _OfKey:
        memory.limit(self._keys)
        return self._keys.setdefault(key, _OfKey())

    def starts_at(self, key: Key, certain: int, most: int, specializes: bool = False) -> int | None:
        """Returns the number of steps after which a call records its step; None for not in this call.

        Args:
            certain: steps that the call makes whatever the model predicts.
            most: steps that it may make.
            specializes: a recording for any batch exists.
        """
        needed = self._repaid_by(key.rows, specializes)
        if self._of_key(key).spent >= MANY * needed or certain >= needed:
            return 0
        expected = self._expected(most)
        if expected >= needed:
            return 0
        # The length of calls is unknown, or they are short: this call has to go on for some tokens first.
        seen = max(TOKENS_SEEN, int(min(needed, 2 * expected)))
        return seen if most - seen >= needed and most > certain else None

    def _expected(self, most: int) -> float:
        """Returns the expected number of tokens of a call that may end at any of them."""
        return min(most, self._tokens) if self._tokens is not None else 0

    def with_more_rows(
        self, key: Key, others: Iterable[Key], certain: int, most: int, making: float | None
    ) -> Key | None:
        """Returns the key of a step for more inputs, the fewest possible, that should serve a call of `key`; or None.

        Args:
            others: keys of existing steps that differ in nothing but the number of inputs.
            certain, most: as in `starts_at`.
            making: seconds that making a step of `key` would take; None if it would not be made at once.
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
        """Notes that a call of `key` has made this many steps of `larger`."""
        self._of_key(key).lost += steps * self._idle(key.rows, larger.rows)

    def _idle(self, rows: int, larger: int) -> float:
        """Returns at most how many seconds the additional rows take in a step.

        The estimate is an upper bound, because a step reads all weights however few rows it has.
        """
        fewer = (known for known in self.replayed if known <= rows)
        known = max(fewer, default=None)
        alone = self.replayed[larger] * rows / larger if known is None else self.replayed[known]
        return max(self.replayed[larger] - alone, 0.0)

    def making(self, specializes: bool) -> float:
        """Returns the seconds that making a step takes: recording it, or specializing an existing recording."""
        return self.specializing if specializes else self.recording or 0.0

    @property
    def specializing(self) -> float:
        """Seconds that it takes to specialize a recording for another number of inputs."""
        if self._specializing is not None:
            return self._specializing
        return PART_OF_SPECIALIZING * (self.recording or 0.0)

    def steps_of_specializing(self, seconds: float, is_recorded: bool = True) -> float:
        """Returns the cost of specializing a step for another number of inputs, in steps of `seconds`; 0 if unknown.

        Args:
            is_recorded: a recording for any number of inputs exists.
        """
        taken = self.specializing if is_recorded else _RECORDINGS * (self.recording or 0.0)
        if not taken:
            return 0.0
        return taken / seconds if seconds else math.inf

    def note_specializing(self, seconds: float) -> None:
        """Notes the time of specializing a step. The least one counts, as other processes may disturb it."""
        self._specializing = seconds if self._specializing is None else min(self._specializing, seconds)

    def note_eager(self, rows: int, seconds: float) -> None:
        """Notes the time of a step that was not replayed. The least one counts, as other processes may disturb it."""
        self.eager[rows] = min(self.eager.get(rows, seconds), seconds)

    def note_call(self, key: Key, tokens: int, may_end: bool, eager_steps: int) -> None:
        """Notes that a call of this key has generated this many tokens, with this many steps that were not replayed."""
        self._of_key(key).spent += eager_steps
        if may_end:
            before = tokens if self._tokens is None else self._tokens
            self._tokens = before + _WEIGHT * (tokens - before)

    def has_asked_for(self, key: Hashable, steps: int, needed: int) -> bool:
        """Whether calls of this key have asked for `needed` steps, including the present call's `steps`."""
        known = self._of_key(key)
        known.spent += steps
        return known.spent >= needed

    def budget(self, key: Hashable) -> Budget:
        """Returns the budget for what the steps of this key need."""
        return self._of_key(key).budget

    def forget(self, key: Hashable | None = None) -> None:
        """Notes that the recording of this key, or all recordings, are gone, so that a new one has to pay again."""
        if key is None:
            self._keys.clear()
        else:
            self._keys.pop(key, None)

    def _repaid_by(self, rows: int, specializes: bool) -> float:
        """Returns the number of steps that repay a capture, from measurements of the nearest number of rows."""
        known = self.eager.keys() & self.replayed.keys()
        if self.recording is None or not known:
            return STEPS_OF_SPECIALIZING if specializes else STEPS
        nearest = min(known, key=lambda other: abs(other - rows))
        measured = max(1 - self.replayed[nearest] / self.eager[nearest], 0.0)
        saved = self.eager[nearest] * (len(known) * measured + SAVED) / (len(known) + 1)
        return min(max(self.making(specializes) / saved, LEAST_STEPS), MOST_STEPS)
