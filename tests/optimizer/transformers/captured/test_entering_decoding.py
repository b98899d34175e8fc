"""Kinds of inputs that share a step: what serves both of two, whoever comes first, and the numbers of each input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper
from transformers.generation import logits_process as library

from fastgen.optimizer.transformers.captured import rewritten_processors as rewritten
from fastgen.optimizer.transformers.captured.entering_decoding import MOST_ALIKE, Kind
from fastgen.optimizer.transformers.captured.key import Key, Sizes
from fastgen.optimizer.transformers.captured.processors import Signed
from fastgen.optimizer.transformers.captured.rewritten_processors import Bucket
from tests.optimizer.transformers.captured.test_processors import (
    CPU,
    FIRST,
    PROCESSORS,
    VOCABULARY,
    Call,
    Step,
    captured,
    expected_of,
    known,
    scores_of,
    signature,
)  # fmt: skip

PENALTY = Signed((rewritten.RepetitionPenalty, False), (None,))
TOP_K, TOP_P = Signed((rewritten.TopK, 64, -1.0), ()), Signed((rewritten.TopP, -1.0, 1), ())
NGRAM = Signed((rewritten.NoRepeatNGram, 3), ())  # never neutral
BAN, OTHER_BAN = (Signed((rewritten.Ban, 4, rewritten.When(torch.lt, "prompt")), ((n,),)) for n in (1, 2))


def kind(*processors: Signed, eos: tuple[int, ...] = (1,), host: bool = False, **changes: Any) -> Kind:
    options: dict[str, Any] = {"early_stopping": None, "samples": False, "has_criteria": False, "kept": ()} | changes
    signatures = None if host else tuple(each.signature for each in processors)
    key = Key(1, 1, Sizes(0, 0, 0, 0), 1, None, False, ends=4, processors=signatures, tensors=(), constants=(), kv=(),
              windows=(), **options)  # fmt: skip
    return Kind(key, None if host else processors, eos, 0)


def test_a_kind_serves_itself() -> None:
    for each in (kind(), kind(PENALTY, NGRAM), kind(host=True), kind(samples=True, kept=("scores",))):
        assert each.with_inputs_of(each) == each


@pytest.mark.parametrize(
    ("one", "other", "processors"),
    [
        (kind(), kind(TOP_P, samples=True), (TOP_P,)),
        (kind(PENALTY), kind(TOP_K, samples=True), {PENALTY, TOP_K}),
        (kind(PENALTY, TOP_P), kind(TOP_K, TOP_P), {PENALTY, TOP_K, TOP_P}),
        (kind(BAN), kind(OTHER_BAN), {BAN, OTHER_BAN}),
        (kind(NGRAM, TOP_K), kind(NGRAM), (NGRAM, TOP_K)),
    ],
)
def test_neutral_processors(one: Kind, other: Kind, processors: Any) -> None:
    found = one.with_inputs_of(other)
    assert found is not None and found == other.with_inputs_of(one)
    assert found.key.samples == (one.key.samples or other.key.samples)
    assert type(processors)(found.processors or ()) == processors
    assert found.key.processors == tuple(each.signature for each in found.processors or ())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (kind(NGRAM), kind()),
        (kind(), kind(eos=(2,))),
        (kind(), kind(host=True)),
        (kind(early_stopping=False), kind(early_stopping=False, samples=True)),
        (kind(early_stopping=False), kind(early_stopping=True)),
        (kind(), kind()._replace(fill=7)),
    ],
)
def test_what_does_not_go_together(one: Kind, other: Kind) -> None:
    assert one.with_inputs_of(other) is None and other.with_inputs_of(one) is None


def test_criteria_and_what_is_kept() -> None:
    found = kind(has_criteria=True, kept=("logits",)).with_inputs_of(kind(kept=("scores",)))
    assert found is not None and found.key.has_criteria and found.key.kept == ("scores", "logits")
    on_host = kind(host=True).with_inputs_of(kind(host=True, samples=True))
    assert on_host is not None and on_host.key.samples and on_host.processors is None


def test_a_step_does_not_get_a_processor_of_each_request() -> None:
    """As of a translator, whose requests force the token of their language each."""
    bans = [Signed(BAN.signature, ((n,),)) for n in range(MOST_ALIKE + 1)]
    most = kind(*bans[:-1])
    assert most.with_inputs_of(kind(bans[0])) == kind(bans[0]).with_inputs_of(most) == most
    assert most.with_inputs_of(kind(bans[-1])) is None and kind(bans[-1]).with_inputs_of(most) is None
    assert kind(*bans).with_inputs_of(kind(bans[2])) == kind(*bans)  # a request may have more


TEMPERATURE, MIN_P = (
    Signed((rewritten.Library, warper, (), (name,)), ())
    for warper, name in ((TemperatureLogitsWarper, "temperature"), (MinPLogitsWarper, "min_p"))
)
ENDS = Signed((rewritten.Force, 1, rewritten.When(torch.eq, "limit")), ((1,),))
IN_ORDER = (PENALTY, BAN, OTHER_BAN, ENDS, TEMPERATURE, TOP_K, TOP_P, MIN_P)


@given(data=st.data())
@settings(max_examples=60)
def test_any_that_the_library_makes_come_to_one_step(data: st.DataObject) -> None:
    """Whoever comes when: each processor is there once, so that what is recorded serves the next mixture of these."""
    several = data.draw(st.lists(st.lists(st.sampled_from(IN_ORDER), unique=True), min_size=1, max_size=5))
    wide: Kind | None = kind()
    for chosen in several:
        assert wide is not None
        wide = wide.with_inputs_of(kind(*sorted(chosen, key=IN_ORDER.index)))
    present = {each for chosen in several for each in chosen}
    assert wide == kind(*sorted(present, key=IN_ORDER.index))


ALL = (PENALTY, TOP_K, TOP_P, BAN, OTHER_BAN)


@given(one=st.lists(st.sampled_from(ALL), max_size=4), other=st.lists(st.sampled_from(ALL), max_size=4))
@settings(max_examples=60)
def test_numbers_find_their_places(one: list[Signed], other: list[Signed]) -> None:
    """In any order, and more than once: each processor of either is there, in its order; the rest is neutral."""
    kinds = kind(*one), kind(*other)
    wide = kinds[0].with_inputs_of(kinds[1])
    alike = Counter(each.signature for each in (*one, *other))
    if max(alike.values(), default=0) > MOST_ALIKE and wide is None:
        assert kinds[1].with_inputs_of(kinds[0]) is None
        return
    assert wide is not None and wide == kinds[1].with_inputs_of(kinds[0])
    assert len(wide.processors or ()) <= len(one) + len(other)
    for each, own in zip(kinds, (one, other), strict=True):
        found = each.numbers(wide)
        assert [number for number in found if isinstance(number, int)] == list(range(len(own)))
        for shared, number in zip(wide.processors or (), found, strict=True):
            assert shared == own[number] if isinstance(number, int) else len(number) == 1


# ---- the numbers of each input in a step with slots


# Of each kind whose numbers are those of each input in slots, some that differ in nothing else.
OF_EACH_INPUT: dict[str, Callable[[Call], list[Any]]] = {
    "min_length": lambda call: [library.MinLengthLogitsProcessor(n, torch.tensor([2])) for n in (3, 9, 6)],
    "forced_eos": lambda call: [library.ForcedEOSTokenLogitsProcessor(call.limit - n, 2) for n in (0, 4, 1)],
    "repetition": lambda call: [library.RepetitionPenaltyLogitsProcessor(x) for x in (1.3, 0.7, 1.0)],
    "temperature": lambda call: [library.TemperatureLogitsWarper(x) for x in (0.7, 1.0, 1.9)],
    "top_k": lambda call: [library.TopKLogitsWarper(n) for n in (4, 50, 1)],
    "top_p": lambda call: [library.TopPLogitsWarper(x) for x in (0.8, 0.33, 0.95)],
    "min_p": lambda call: [library.MinPLogitsWarper(x) for x in (0.1, 0.7, 0.003)],
    "typical": lambda call: [library.TypicalLogitsWarper(x) for x in (0.6, 0.2, 0.9)],
    "epsilon": lambda call: [library.EpsilonLogitsWarper(x) for x in (0.05, 0.2, 0.001)],
}


@pytest.mark.parametrize("name", OF_EACH_INPUT)
def test_each_input_has_numbers_of_its_own(name: str) -> None:
    """Where they come and go: also behind a move to another place, and in a step for more inputs."""
    call = Call(inputs=3, beams=2)
    lengths, given = call.lengths, OF_EACH_INPUT[name](call)
    made = captured(given[2], Bucket(CPU, 3, call.beams, VOCABULARY, slots=True), lengths)
    assert len({signature(each, lengths) for each in given}) == 1
    one, larger = made.of_batch(1), made.of_batch(5)
    for place, each in enumerate(given[:2]):
        own = known(each, lengths)
        one.put(own.numbers)
        made.insert(one, 0, place)
        assert own.shared() is not None and own.shared() == known(given[2], lengths).shared()
    for place, target in enumerate((4, 0, 2)):
        larger.insert(made, place, target)
    order, step, large = [1, 1, 2, 1, 0], Step(call.rows), call._replace(inputs=5)
    for length in range(call.prompt, call.limit):
        scores = scores_of(call.rows, seed=length)
        expected = [expected_of(each, call, length, scores) for each in given]
        result = made(scores.clone(), step.set(call, length)).unflatten(0, (3, 2))
        for place, alone in enumerate(expected):
            torch.testing.assert_close(result[place], alone.unflatten(0, (3, 2))[place], rtol=0, atol=0)
        scores = scores_of(large.rows, seed=length)
        expected = [expected_of(given[number], large, length, scores) for number in order]
        result = larger(scores.clone(), Step(large.rows).set(large, length)).unflatten(0, (5, 2))
        for place in (0, 2, 4):
            torch.testing.assert_close(result[place], expected[place].unflatten(0, (5, 2))[place], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted({*OF_EACH_INPUT, "suppress_at_begin"} - {"typical"}))
def test_neutral_numbers_change_no_bit(name: str) -> None:
    """Of one input; those beside it get what their own numbers say."""
    call = Call(inputs=3, beams=2)
    lengths = call.lengths
    processor = PROCESSORS[name](call) if name in PROCESSORS else OF_EACH_INPUT[name](call)[0]
    made = captured(processor, Bucket(CPU, 3, call.beams, VOCABULARY, slots=True), lengths)
    nothing = known(processor, lengths).neutral
    assert nothing is not None
    made.put(nothing, 1)
    step = Step(call.rows)
    for length in range(call.prompt, call.limit):
        scores = scores_of(call.rows, seed=length)
        scores[2:4, length % VOCABULARY] = -torch.inf
        expected = expected_of(processor, call, length, scores)
        result = made(scores.clone(), step.set(call, length))
        assert torch.equal(result[2:4], scores[2:4])
        for rows in (slice(0, 2), slice(4, 6)):
            torch.testing.assert_close(result[rows], expected[rows], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["suppress", "no_repeat_2", "bad_words", "inf_nan", "normalise", "typical"])
def test_some_are_never_neutral(name: str) -> None:
    assert known(PROCESSORS[name](FIRST), FIRST.lengths).neutral is None
