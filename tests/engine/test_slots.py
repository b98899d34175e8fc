"""Requests that enter a decode step while others go on, and leave it before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastgen
from fastgen import releases
from fastgen.decoding.captured.graph import CapturedPart
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured import any_batch
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.captured.slots import Slots
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.engine.conftest import (
    PROMPTS,
    WAIT,
    StopsAt,
    alone,
    assert_as_alone,
    both_kinds,
    check,
    coming,
    requests_for,
    run,
)
from tests.equivalence.models import BY_NAME, EOS
from tests.noting import noted

# Those of the support table's must-list that have tiny models.
MUST = [
    "llama", "gpt2", "qwen2", "qwen3", "mistral-long-window", "gemma", "gemma2", "phi", "opt", "gpt-neox", "bloom",
    "bart", "mbart", "marian", "pegasus", "m2m100", "nllb", "t5", "mt5", "blenderbot",
]  # fmt: skip
# Its sliding window is shorter than what the tests ask for, and it reads masks besides.
WINDOWED = ("gemma2",)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2, "early_stopping": "never", "length_penalty": 2.0},
    {"do_sample": True, "num_return_sequences": 2, "top_k": 30},
    {"do_sample": True, "num_beams": 3, "temperature": 0.7},
    {"min_new_tokens": 5, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MUST)
def test_requests_come_one_by_one(name: str, options: dict[str, Any]) -> None:
    """The models of the must-list run in slots, three at a time, and each request gets what a call of its own gives."""
    model, rows = BY_NAME[name].build(), max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    executor = ContinuousBatches(model, 3 * rows)
    requests = requests_for(model, PROMPTS, **options)
    run(executor, requests)
    assert_as_alone(model, requests, PROMPTS)
    assert executor.has_slots and not executor.busy
    if name not in WINDOWED:
        assert executor.counts["busy_row_steps"] and not (executor.alone or executor.counts["repeated"])


def test_a_longer_prompt_comes_while_others_go_on(model: Any) -> None:
    """The buffers grow, of prompts and of sources, and keep what is there."""
    executor = ContinuousBatches(model, 16)
    check(executor, [PROMPTS[0], PROMPTS[1], list(range(20, 159)), [7, 8, 9] * 60], num_beams=2, max_new_tokens=24)
    assert executor.counts["steps"] < 4 * 24, "they have run together"


class _Allocations(TorchDispatchMode):
    """Counts the operators that allocate memory. The one of this number has none."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.count, self._fails_at = 0, fails_at

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given, new = (
            {each.untyped_storage()._cdata for each in tree_leaves(tree) if isinstance(each, torch.Tensor)}
            for tree in ((args, kwargs), made)
        )
        self.count += not new <= given
        if new - given and self.count == self._fails_at:
            raise MemoryError("cannot allocate memory")
        return made


def reserving(monkeypatch: pytest.MonkeyPatch, growth: Callable[[Callable[[], Any]], Any]) -> None:
    """Steps reserve memory for larger buffers, where they have not enough, as `growth` has it."""
    reserve = DecodeStep.reserve

    def reserved(step: DecodeStep, needed: Any) -> Any:
        given = partial(reserve, step, needed)
        return given() if step.sizes.fit(needed) else growth(given)

    monkeypatch.setattr(DecodeStep, "reserve", reserved)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["rows", "beams"])
@both_kinds
def test_all_memory_of_larger_buffers_is_there_before_one_is_exchanged(
    model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, int]] = []

    def growth(reserve: Callable[[], Any]) -> Any:
        with _Allocations() as before:
            grow = reserve()

        def grown() -> None:
            with _Allocations() as meanwhile:
                grow()
            counts.append((before.count, meanwhile.count))

        return grown

    reserving(monkeypatch, growth)
    prompts = [PROMPTS[0], [7, 8, 9] * 60, PROMPTS[1]]
    check(ContinuousBatches(model, 16), prompts, max_new_tokens=100, eos_token_id=None, **options)
    assert counts and all(before and not meanwhile for before, meanwhile in counts)


@pytest.mark.parametrize("fails_at", [1, 3, 5, 7])
def test_a_step_that_memory_runs_out_for_goes_on_as_it_is(
    llama: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it has changed. The request that it was to grow for runs by itself."""
    failures: list[int] = []

    def growth(reserve: Callable[[], Any]) -> Any:
        if failures:
            return reserve()
        failures.append(fails_at)
        with _Allocations(fails_at):
            return reserve()

    prompts = [PROMPTS[0], [7, 8, 9] * 60, PROMPTS[1]]
    executor = ContinuousBatches(llama, 16)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="MemoryError"):
        reserving(patch, growth)
        check(executor, prompts, max_new_tokens=24)
    assert executor.counts["busy_row_steps"] and not executor.counts["repeated"]
    check(executor, prompts, max_new_tokens=24)


@both_kinds
def test_buffers_do_not_grow_with_bursts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come one by one, and then several at once, again and again: steps of other batches take them over."""
    asked = noted(monkeypatch, DecodeStep, "make_room", lambda step, needed: needed)
    executor = ContinuousBatches(model, 8)
    for _ in range(3):
        requests = requests_for(model, PROMPTS, 8, max_new_tokens=12)
        run(executor, requests[:1])
        left = requests[1:]
        for _ in executor.steps(lambda left=left: [left.pop(0)] if len(left) > 2 else []):  # type: ignore[misc]
            pass
        run(executor, [each for each in requests if not each.future.done()], at_once=8)
        assert_as_alone(model, requests, PROMPTS)
    assert {needed.new for needed in asked} == {67} and max(needed.cached for needed in asked) <= 129


DIFFERENT: list[list[dict[str, Any]]] = [
    [{"temperature": 0.6}, {}, {"temperature": 1.7}],  # of which one has no temperature
    [{"top_k": 5, "top_p": 0.8}, {"top_k": 40, "top_p": 0.5, "temperature": 0.9}],
    [{"repetition_penalty": 1.3, "min_p": 0.2}, {"repetition_penalty": 0.8, "min_p": 0.01}],
    [{"renormalize_logits": True, **each} for each in ({"typical_p": 0.3}, {"typical_p": 0.9, "temperature": 1.2})],
    [{"num_beams": 3, "temperature": 0.7}, {"num_beams": 3, "temperature": 1.5}],
    [{"do_sample": False, "repetition_penalty": 1.4}, {"do_sample": False, "repetition_penalty": 0.9}],
    [{"do_sample": False, "num_beams": 2, "min_new_tokens": n} for n in (2, 5, 9)],
    # Processors that others do not have are neutral for these.
    [{"do_sample": False}, {"temperature": 0.7}, {"top_p": 0.8}, {"do_sample": False, "repetition_penalty": 1.4}],
    [{"top_k": 5}, {"do_sample": False}, {"epsilon_cutoff": 0.02}, {"min_p": 0.1}],
    [{"do_sample": False, "num_beams": 3, **each} for each in ({}, {"repetition_penalty": 1.3}, {"min_new_tokens": 4})],
    [{"num_beams": 3}, {"num_beams": 3, "top_p": 0.7}, {"num_beams": 3, "repetition_penalty": 1.3}],
    [{"no_repeat_ngram_size": 2, **each} for each in ({"do_sample": False}, {}, {"top_p": 0.5})],
]


@both_kinds
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("options", DIFFERENT, ids=map(str, range(len(DIFFERENT))))
def test_numbers_of_processors_are_each_requests_own(
    model: Any, options: list[dict[str, Any]], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temperatures, penalties, thresholds: requests that differ in these alone are in one step."""
    if captured:
        monkeypatch.setattr(Ledger, "_repaid_by", lambda *asked: 0)
        monkeypatch.setattr(Ledger, "specializing", 0.0)
    executor, prompts, requests, kinds = ContinuousBatches(model, 16), PROMPTS * 2, [], set[int]()
    for number, prompt in enumerate(prompts):
        given = {"do_sample": True, "top_k": 0, "max_new_tokens": 9 + 3 * (number % 4), "eos_token_id": None}
        given |= options[number % len(options)]
        requests.append(make(model, prompt, None, given, number if given["do_sample"] else None, 16))
    for _ in executor.steps(coming(executor, requests, 3)):
        kinds.add(len(executor._in_use))
    assert_as_alone(model, requests, prompts)
    assert kinds <= {0, 1} and not executor.alone


class _Releases:
    """Lets scores go, and so FastGen need not make them: what `fastgen-generate` does for the scores of sequences."""

    releases_scores = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        scores[-1].set_()
        return torch.zeros(len(input_ids), dtype=torch.bool)


RETURNED: list[dict[str, Any]] = [
    {}, {"output_logits": True}, {"num_beams": 3, "num_return_sequences": 2, "output_scores": True},
    {"num_beams": 2, "stopping_criteria": [_Releases()], "output_scores": True},
    {"do_sample": True, "output_scores": True, "num_return_sequences": 2},
    {"stopping_criteria": [StopsAt(4)], "output_scores": True},
    {"num_beams": 2, "stopping_criteria": [_Releases(), StopsAt(3)], "output_scores": True},
]  # fmt: skip


@both_kinds
@pytest.mark.parametrize("options", RETURNED, ids=map(str, range(len(RETURNED))))
def test_what_is_returned_beside_the_sequences(model: Any, options: dict[str, Any]) -> None:
    """Scores, logits, the scores of sequences and their beams are those of a call of its own."""
    executor, prompts = ContinuousBatches(model, 6), PROMPTS + PROMPTS[:2]
    requests = requests_for(model, prompts, return_dict_in_generate=True, **options)
    run(executor, requests, at_once=3)
    assert executor.counts["busy_row_steps"] and not executor.counts["repeated"]
    for request, prompt in zip(requests, prompts, strict=True):
        if request.seed is not None:
            torch.manual_seed(request.seed)
        found, expected = request.future.result(0), alone(model, prompt, **request.options)
        assert type(found) is type(expected)
        assert releases.cache_name() not in found, "K and V of a request end with it"
        assert torch.equal(found.sequences, expected.sequences)
        for name in ("sequences_scores", "beam_indices", "scores", "logits"):
            if name == "scores" and options.get("stopping_criteria") and "num_beams" in options:
                continue  # they have been let go
            own, others = getattr(found, name, None), getattr(expected, name, None)
            assert (own is None) == (others is None), name
            if name in ("scores", "logits") and own is not None:
                # Of what stands behind the end of a sequence, scores say nothing.
                ends = (expected.sequences[:, -len(own) :] == EOS).int()
                goes_on = (ends.cumsum(dim=1) == ends).T if "num_beams" not in options else ...
                own, others = torch.stack(own)[goes_on], torch.stack(others)[goes_on]
            if own is not None:
                torch.testing.assert_close(own, others, atol=1e-4, rtol=1e-4)


def test_streams_side_by_side(llama: Any) -> None:
    """Tokens come while others' do, and not at the end."""
    with fastgen.Engine(llama) as engine:
        streams: list[Iterator[int]] = [
            engine.stream(prompt, max_new_tokens=30, eos_token_id=None) for prompt in PROMPTS
        ]
        first = [next(stream) for stream in streams]
        rest = [list(stream) for stream in streams]
        assert engine.stats()["steps"] < 30 * len(PROMPTS)
    for prompt, one, others in zip(PROMPTS, first, rest, strict=True):
        assert [one, *others] == alone(llama, prompt, max_new_tokens=30, eos_token_id=None)[0, len(prompt) :].tolist()


def test_what_a_step_is_found_out_to_do_is_kept(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that ended before it paid to capture it, as those of a token each do."""
    watched, executor = noted(monkeypatch, DecodeStep, "watch"), ContinuousBatches(llama, 8)
    for prompt in PROMPTS[:3]:
        check(executor, [prompt], max_new_tokens=1)
    assert len(watched) == 1


@pytest.mark.usefixtures("recorded_at_once")
def test_what_is_recorded_is_asked_for_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that enter a captured step do not look at the model's state for it."""
    asked: list[Any] = []
    monkeypatch.setattr(any_batch, "is_recorded", lambda *given: (asked.append(given), True)[1])
    requests = requests_for(llama, PROMPTS * 2)
    run(ContinuousBatches(llama, 8), requests)
    assert len(asked) == 1
    assert_as_alone(llama, requests, PROMPTS * 2)


def test_a_short_one_of_another_kind_does_not_keep_a_long_one_from_its_recording(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It widens the step before that is recorded, and leaves at once."""
    recorded = noted(monkeypatch, CapturedPart, "specialize")
    executor = ContinuousBatches(llama, 8, max_stall=None)
    long, short = {"max_new_tokens": 60}, {"max_new_tokens": 2, "do_sample": True}
    requests = [
        each
        for prompt, options in zip(PROMPTS, (long, short), strict=False)
        for each in requests_for(llama, [prompt], eos_token_id=None, **options)
    ]
    run(executor, requests, at_once=2)
    assert_as_alone(llama, requests, PROMPTS[:2])
    assert recorded and executor.counts["steps"] < 70


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each step computes."""
    found, advance = list[int](), Slots.advance
    monkeypatch.setattr(Slots, "advance", lambda step, *given: (advance(step, *given), found.append(step.slots))[0])
    return found


def of_lengths(model: Any, *counts: int) -> list[Request]:
    """Requests for that many tokens each, all of the same prompt."""
    return [make(model, PROMPTS[0], None, {"max_new_tokens": count, "eos_token_id": None}, None, 8) for count in counts]


def test_how_many_places_are_computed_depends_on_no_clock_if_all_is_captured(
    llama: Any, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on what others have left: the number of rows decides about the bits of products."""
    made = []
    with fastgen.settings.changed(captured_step="always"):
        for seconds in (0.0, 1000.0, 0.0):
            monkeypatch.setattr(Ledger, "specializing", seconds)
            requests = of_lengths(llama, *range(10, 74, 8))
            run(ContinuousBatches(llama, 8, max_stall=None), requests, at_once=8)
            made.append([*computed])
            computed.clear()
    assert made[0] == made[1] == made[2] and len(set(made[0])) > 2


@pytest.mark.parametrize(("max_stall", "most"), [(1.0, 2), (None, 1)], ids=["server", "list"])
def test_a_step_is_not_recorded_for_each_kind_that_widens_it(
    llama: Any, max_stall: float | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all is captured, as in a server. Of a list of one kind, the first step is captured already."""
    recorded = noted(monkeypatch, any_batch.SymbolicStep, "__init__")
    kinds: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "temperature": 0.7}]
    kinds += [{"do_sample": True, "top_p": 0.8}, {"do_sample": True, "top_k": 5}]
    options = [{"max_new_tokens": 30, "eos_token_id": None, **kind} for kind in (kinds if max_stall else kinds[:1] * 5)]
    executor = ContinuousBatches(llama, 8, max_stall=max_stall)
    with fastgen.settings.changed(captured_step="always"):
        requests = [make(llama, prompt, None, each, 3, 8) for prompt, each in zip(PROMPTS, options, strict=False)]
        run(executor, requests, at_once=8)
    assert 0 < len(recorded) <= most and executor.counts["steps"] < 40


def test_places_that_were_computed_before_are_again_at_once(llama: Any, computed: list[int]) -> None:
    """A program that these inputs have waited for is used whenever it fits, if all is captured."""
    executor = ContinuousBatches(llama, 4, max_stall=None)
    waiting, later = of_lengths(llama, 80, 80, 6, 6), of_lengths(llama, 6, 6)

    def more() -> list[Request]:
        if len(computed) == 40:
            waiting.extend(later)
            later.clear()
        return executor.choose(waiting) if waiting else []

    with fastgen.settings.changed(captured_step="always"):
        for _ in executor.steps(more):
            pass
    assert {*computed[:70]} == {2, 4} and computed.count(4) <= 2 * 6, computed


@pytest.mark.usefixtures("recorded_at_once")
def test_a_program_waits_until_it_is_known_what_a_step_takes(
    llama: Any, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for more places is there, of other inputs: the first step is made with that."""
    monkeypatch.setattr(Ledger, "specializing", 1000.0)
    for count in (8, 5):
        computed.clear()
        run(ContinuousBatches(llama, 8), of_lengths(llama, *[9] * count), at_once=8)
    assert {*computed} == {8}


@pytest.mark.usefixtures("recorded_at_once")
def test_a_program_for_fewer_places_has_to_pay(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is measured where no step was recorded for itself: one that takes long is not made for each row."""
    made = noted(monkeypatch, CapturedPart, "specialize", lambda part, inputs, *given: inputs)
    note = Ledger.note_specializing
    monkeypatch.setattr(Ledger, "note_specializing", lambda ledger, seconds: note(ledger, 1000.0 + seconds))
    requests = of_lengths(llama, *range(10, 42, 4))
    run(ContinuousBatches(llama, 8), requests, at_once=8)
    assert_as_alone(llama, requests, PROMPTS[:1] * 8)
    assert Ledger.of(llama).specializing >= 1000 and len(made) <= 2, made


@both_kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_a_budget_of_memory(model: Any, options: dict[str, Any]) -> None:
    """What came last begins again later; all finish, and never is there more than the budget."""
    options = {"max_new_tokens": 60, "eos_token_id": None, **options}
    probe = ContinuousBatches(model, 32)
    run(probe, requests_for(model, PROMPTS, **options), at_once=8)
    budget = probe.stats()["kv_bytes"] // 3
    executor = ContinuousBatches(model, 32, cache_bytes=budget)
    check(executor, PROMPTS, at_once=8, **options)
    assert executor.counts["preempted"] and executor.stats()["kv_bytes"] <= budget


def test_stored_bytes_of_one_request(llama: Any) -> None:
    """Also of one that is alone: those of its prompt, and of its new tokens when it goes on to its last step."""
    executor, (request,) = ContinuousBatches(llama, 8), requests_for(llama, PROMPTS[:1], max_new_tokens=6)
    run(executor, [request])
    config = llama.config
    position = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert executor.stats()["kv_bytes"] == (len(PROMPTS[0]) + 4) * position


def test_one_that_needs_more_than_the_budget(llama: Any) -> None:
    executor = ContinuousBatches(llama, 8, cache_bytes=40_000)
    requests = requests_for(llama, PROMPTS, max_new_tokens=10)
    large = make(llama, PROMPTS[0], None, {"max_new_tokens": 450, "num_beams": 8}, None, 8)
    run(executor, [*requests, large])
    assert_as_alone(llama, requests, PROMPTS)
    assert isinstance(large.future.exception(0), MemoryError)


def test_weights_that_are_written_in_a_pause(llama: Any) -> None:
    """Also where nothing tells of it: beginnings of prompts are read again."""
    prompts = [[*range(20, 110), number] for number in (3, 4)]
    with fastgen.Engine(llama) as engine:
        engine.generate(prompts)
        with engine.paused():
            llama.get_input_embeddings().weight.data.mul_(-1.0)
        for prompt in prompts:
            assert torch.equal(engine.submit(prompt).result(WAIT), alone(llama, prompt))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.usefixtures("recorded_at_once")
def test_nothing_is_computed_of_slots_that_are_empty(model: Any, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that go on take the places of those that are over, in the middle of a step of many."""
    monkeypatch.setattr(Ledger, "specializing", 0.0)
    executor = ContinuousBatches(model, 8 * beams)
    prompts = PROMPTS + PROMPTS[:2]
    requests = [
        request  # the first ones end first
        for place, prompt in enumerate(prompts)
        for request in requests_for(model, [prompt], 8 * beams, num_beams=beams, max_new_tokens=6 + 4 * place)
    ]
    run(executor, requests, at_once=8)
    assert_as_alone(model, requests, prompts)
    assert executor.counts["busy_row_steps"] >= 0.9 * executor.counts["row_steps"]
