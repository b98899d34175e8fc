"""The library's schedules of how many tokens are drafted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.optimizer.transformers.speculation.drafts import Schedule


def test_the_next_shorter_length() -> None:
    """One that an iteration may draft."""
    schedule = Schedule(2, "heuristic")
    assert [schedule.choose([0], most) for most in (-1, 0, 1, 10)] == [0, 0, 1, 1]
    schedule.observe([0], 1, [1], [1])
    assert schedule.length == 4
    assert [schedule.choose([0], most) for most in (2, 3, 10)] == [1, 3, 3]


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=20),
    st.sampled_from(["heuristic", "heuristic_transient", "constant"]),
)
@settings(max_examples=50)
def test_schedules_are_the_librarys(steps, name) -> None:
    library = pytest.importorskip("transformers.generation.candidate_generator")
    generator = library.AssistedCandidateGenerator.__new__(library.AssistedCandidateGenerator)
    generator.num_assistant_tokens = 5
    generator.assistant_generation_config = SimpleNamespace(
        num_assistant_tokens_schedule=name, assistant_confidence_threshold=None
    )
    ours = Schedule(5, name)
    for drafted, accepted in steps:
        accepted = min(drafted, accepted)
        generator.update_candidate_strategy(None, [range(drafted + 1)], accepted)
        ours.observe([0], drafted, [drafted], [accepted])
        assert ours.length == generator.num_assistant_tokens


def test_a_schedule_goes_by_every_row_that_had_a_draft() -> None:
    schedule = Schedule(5, "heuristic")
    for drafted, accepted, length in (([3], [3], 7), ([9, 4], [9, 3], 6), ([8, 0], [8, 0], 8), ([0], [0], 8)):
        schedule.observe([0, 1], max(drafted), drafted, accepted)
        assert schedule.length == length
    for _ in range(20):
        schedule.observe([0], 1, [1], [0])
    assert schedule.length == 1
