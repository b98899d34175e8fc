"""When recording a step pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

from fastgen.optimizer.transformers.captured.key import Key, Sizes
from fastgen.optimizer.transformers.captured.pays import (
    LEAST_STEPS,
    MANY,
    MOST_STEPS,
    STEPS,
    TOKENS_SEEN,
    Ledger,
    certain_tokens,
)

KEY = Key(
    batch=1, per_input=1, sizes=Sizes(0, 0, 0, 0), width=1, encoder=None, source_in_front=False, early_stopping=None,
    samples=False, ends=4, processors=(), has_criteria=False, kept=(), tensors=(), constants=(), kv=(), windows=(),
)  # fmt: skip
FOUR, EIGHT = replace(KEY, batch=4), replace(KEY, batch=8)


def measured(recording: float = 1.0, eager: float = 0.1, replayed: float = 0.05) -> Ledger:
    ledger = Ledger()
    ledger.recording = recording
    ledger.eager[1], ledger.replayed[1] = eager, replayed
    return ledger


def of_several(replayed: float) -> Ledger:
    """Measured with one, two and four inputs."""
    ledger = measured(replayed=replayed)
    ledger.eager |= {2: 0.1, 4: 0.1}
    ledger.replayed |= {2: replayed, 4: replayed}
    return ledger


# What is known, and from how many tokens that are certain to come a call records at once.
AT_ONCE: dict[str, tuple[Ledger, Key, int]] = {
    "nothing is known": (Ledger(), KEY, STEPS),
    "a second is repaid by steps that save 50 ms each, it was 60 in one call": (measured(replayed=0.04), KEY, 20),
    "a recording that takes no time": (measured(recording=0.001), KEY, LEAST_STEPS),
    # The measurement may have been disturbed, so it counts half: 20 ms a step are saved. Another one may be better.
    "a step that was not faster": (measured(replayed=0.1), FOUR, 50),
    "a step that was slower": (measured(replayed=0.3), FOUR, 50),
    "no step was faster, with several numbers of rows": (of_several(replayed=0.1), FOUR, 100),
    "no measurement keeps long calls from recording": (measured(recording=1000.0), KEY, MOST_STEPS),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_a_call_that_is_certain_to_repay_it_records_at_once(what: str) -> None:
    ledger, key, certain = AT_ONCE[what]
    assert ledger.starts_at(key, certain=certain, most=certain) == 0
    assert ledger.starts_at(key, certain=certain - 1, most=certain - 1) is None


def test_a_call_that_may_end_first_shows_that_it_goes_on() -> None:
    assert Ledger().starts_at(KEY, certain=1, most=100) == TOKENS_SEEN
    assert Ledger().starts_at(KEY, certain=1, most=TOKENS_SEEN + STEPS) == TOKENS_SEEN
    assert Ledger().starts_at(KEY, certain=1, most=TOKENS_SEEN + STEPS - 1) is None


def test_calls_are_expected_to_be_as_long_as_others_were() -> None:
    ledger = Ledger()
    for _ in range(4):
        ledger.note_call(FOUR, tokens=60, may_end=True, eager_steps=0)
    assert ledger.starts_at(KEY, certain=1, most=100) == 0
    for _ in range(20):
        ledger.note_call(FOUR, tokens=4, may_end=True, eager_steps=0)
    assert ledger.starts_at(KEY, certain=1, most=100) == TOKENS_SEEN


def test_calls_that_cannot_end_say_nothing_of_those_that_can() -> None:
    ledger = Ledger()
    ledger.note_call(FOUR, tokens=500, may_end=False, eager_steps=0)
    assert ledger.starts_at(KEY, certain=1, most=100) == TOKENS_SEEN


def test_one_of_many_short_calls_pays_for_the_rest() -> None:
    ledger = Ledger()
    calls = 0
    while ledger.starts_at(KEY, certain=12, most=12) is None:
        ledger.note_call(KEY, tokens=12, may_end=False, eager_steps=12)
        calls += 1
    assert calls == MANY * STEPS // 12
    assert ledger.starts_at(FOUR, certain=12, most=12) is None
    ledger.forget(KEY)
    assert ledger.starts_at(KEY, certain=12, most=12) is None


@pytest.mark.parametrize("replayed, found", [(0.06, FOUR), (0.11, None)])
def test_rows_idle_where_no_step_would_be_recorded(replayed: float, found: Key | None) -> None:
    """A step of four inputs is better than one of the library's for one, if it is faster."""
    ledger = measured()
    ledger.replayed[4] = replayed
    assert ledger.with_more_rows(KEY, [FOUR], certain=5, most=5, making=None) == found


def test_specializing_pays_earlier_than_recording() -> None:
    """It is taken for a quarter of a recording: 0.25 s are 5 steps here, and a call has to have the least."""
    ledger = measured()
    assert ledger.specializing == 0.25
    assert ledger.starts_at(KEY, certain=LEAST_STEPS, most=LEAST_STEPS, specializes=True) == 0
    assert ledger.starts_at(KEY, certain=19, most=19) is None
    assert Ledger().starts_at(KEY, certain=STEPS // 4, most=STEPS, specializes=True) == 0


def test_rows_idle_until_that_has_cost_a_recording() -> None:
    ledger = measured()
    ledger.replayed[4] = 0.06  # 10 ms more than one row takes
    asked = {"certain": 30, "most": 30, "making": ledger.making(specializes=False)}
    assert ledger.with_more_rows(KEY, [EIGHT, FOUR], **asked) == FOUR
    ledger.note_idle(KEY, FOUR, steps=60)
    assert ledger.with_more_rows(KEY, [EIGHT, FOUR], **asked) == FOUR
    ledger.note_idle(KEY, FOUR, steps=30)
    assert ledger.with_more_rows(KEY, [EIGHT, FOUR], **asked) is None
    ledger.forget(KEY)
    assert ledger.with_more_rows(KEY, [EIGHT, FOUR], **asked) == FOUR
    # 0.3 s in this call: more than specializing takes.
    assert ledger.with_more_rows(KEY, [EIGHT, FOUR], 30, 30, ledger.making(specializes=True)) is None


def test_a_step_of_fewer_rows_or_of_unknown_cost_is_not_taken() -> None:
    ledger = measured()
    assert ledger.with_more_rows(FOUR, [KEY], certain=30, most=30, making=1.0) is None
    assert ledger.with_more_rows(KEY, [FOUR], certain=30, most=30, making=1.0) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eos_token_id": 2}, 0),
        ({"eos_token_id": 2, "min_new_tokens": 5}, 5),
        ({"eos_token_id": 2, "min_length": 12}, 2),
        ({"eos_token_id": 2, "min_length": 5}, 0),
        ({"eos_token_id": 2, "min_length": 14, "min_new_tokens": 3}, 4),
        ({"eos_token_id": 2, "min_new_tokens": 99}, 20),
        ({}, 20),
        ({"max_time": 1.0}, 1),
        ({"eos_token_id": 2, "min_new_tokens": 5, "stop_strings": ["."]}, 1),
    ],
)
def test_tokens_that_are_certain(options: dict[str, Any], expected: int) -> None:
    """A prompt of 10 tokens, and room for 20 more."""
    assert certain_tokens(GenerationConfig(**options), 10, 20) == expected


def test_a_budget_for_each_key() -> None:
    ledger = Ledger()
    assert ledger.budget(KEY) is ledger.budget(KEY) is not ledger.budget(FOUR)
