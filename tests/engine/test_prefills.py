"""Prefills of requests that enter slots: beginnings and sources that they share, chunks, and how many at a time."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.slots import Slots
from tests.engine.conftest import PROMPTS, Streamer, alone, assert_as_alone, check, requests_for, run
from tests.equivalence.models import BY_NAME
from tests.noting import noted


def test_beginnings_are_prefilled_once(llama: Any) -> None:
    beginning, random_numbers = [random.Random(1).randrange(5, 150) for _ in range(100)], random.Random(2)
    prompts = [beginning + [random_numbers.randrange(5, 150) for _ in range(n)] for n in (3, 8, 1, 20, 40)]
    executor = ContinuousBatches(llama, 8)
    check(executor, prompts, at_once=8)
    assert executor.stats()["shared_positions"] == 4 * 96
    with torch.no_grad():
        llama.get_input_embeddings().weight.neg_()  # what is known of the old model is of no use any more
    check(executor, prompts)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_source_that_is_masked_altogether(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """The library reads all of it then. Beside others, and by itself."""
    model = BY_NAME[name].build()
    prompts = [
        {"input_ids": torch.tensor([tokens]), "attention_mask": torch.tensor([mask])}
        for tokens, mask in (([9, 10, 11], [1, 1, 1]), ([9, 10, 11], [0, 0, 0]), ([9, 10, 11, 12], [1, 1, 0, 0]))
    ]
    check(ContinuousBatches(model, 8), prompts, at_once=3)
    assert not [each for each in recwarn if "FastGen" in str(each.message)]


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_source_is_encoded_once(name: str) -> None:
    """Also with other options, in one prefill or in several, beside other sources; until the model changes."""
    model, prompts = copy.deepcopy(BY_NAME[name].build()), [PROMPTS[1], PROMPTS[3], PROMPTS[1], PROMPTS[5]] * 2
    executor = ContinuousBatches(model, 32)
    requests = [
        *requests_for(model, prompts[:4], 32, num_beams=2, max_new_tokens=8),
        *requests_for(model, prompts[4:], 32, max_new_tokens=8),
    ]
    run(executor, requests, at_once=8)
    assert_as_alone(model, requests, prompts)
    assert executor.stats()["shared_sources"] == 5 and executor.counts["busy_row_steps"]
    with torch.no_grad():
        model.get_input_embeddings().weight.neg_()
    check(executor, prompts, at_once=8, num_beams=2, max_new_tokens=8)
    assert executor.stats()["shared_sources"] == 10


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_a_long_prompt_is_prefilled_in_chunks(name: str) -> None:
    """Others go on between them."""
    model = BY_NAME[name].build()
    executor = ContinuousBatches(model, 8, max_stall=0.0)
    prompts = [PROMPTS[0], list(range(40, 130)), list(range(10, 150)), [5, 9, 3] * 50, [7, 8, 9] * 50]
    check(executor, prompts, max_new_tokens=40, eos_token_id=None)
    assert executor.stats()["chunks"] >= 3 and not executor.counts["repeated"] and not executor.alone


def test_the_first_long_prompt_is_prefilled_in_chunks(llama: Any) -> None:
    """Nobody knows how long tokens take: prompts before it were too short to tell."""
    executor = ContinuousBatches(llama, 8, max_stall=3600.0)
    check(executor, [PROMPTS[0], list(range(10, 150))], max_new_tokens=40, eos_token_id=None)
    assert executor.stats()["chunks"] == 2


def test_others_go_on_before_a_long_prompt_enters(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering grows buffers, and may have a step recorded: that is not to come on top of the last chunk."""
    executor = ContinuousBatches(llama, 8, max_stall=0.0)
    run(executor, requests_for(llama, [list(range(10, 100))]))  # how long tokens take
    stream, long = requests_for(llama, [PROMPTS[0], list(range(10, 150)) * 2], max_new_tokens=60, eos_token_id=None)
    at_entry, admit = list[tuple[int, int]](), Slots.admit

    def noted(step: Slots, *args: Any) -> None:
        at_entry.append((executor.stats()["chunks"], executor.counts["steps"]))
        admit(step, *args)

    monkeypatch.setattr(Slots, "admit", noted)
    left, chunks, begin = [long, stream], list[int](), executor.counts["steps"]

    def more() -> list[Request]:
        if len(left) == 2:
            return [left.pop()]
        if not left or executor.counts["steps"] < begin + 20:
            return []
        chunks.append(executor.counts["steps"])
        return [left.pop()]

    for _ in executor.steps(more):
        pass
    assert_as_alone(llama, [stream, long], [PROMPTS[0], list(range(10, 150)) * 2])
    _, (between, steps) = at_entry
    assert between >= 1 and steps - chunks[0] == between + 1


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize(("max_stall", "together"), [(0.0, 1), (3600.0, 5), (None, 5)])
def test_how_many_are_prefilled_together(max_stall: float | None, together: int, options: dict[str, Any]) -> None:
    """No more than take a part of the stall that may be, and others go on before the next ones."""
    model = BY_NAME["llama"].build()
    executor = ContinuousBatches(model, 16, max_stall=max_stall)
    known = [list(range(10, 100))]
    run(executor, requests_for(model, known, **options))
    prompts = [list(range(begin, begin + 40)) for begin in range(5, 10)]
    left, steps = requests_for(model, prompts, **options), list[int]()
    requests = list(left)

    def more() -> list[Request]:
        chosen = executor.choose(left) if left else []
        assert len(chosen) in (0, together)
        steps.extend([executor.counts["steps"]] * bool(chosen))
        return chosen

    for _ in executor.steps(more):
        pass
    assert len(steps) == len(set(steps)) == 5 // together
    assert_as_alone(model, requests, prompts)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each call has that enters slots."""
    return noted(monkeypatch, Slots, "admit", lambda step, decoding, kind, entering, *rest: len(entering))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"do_sample": True}, {}),
        ({"do_sample": True}, {"do_sample": True, "temperature": 0.5}),
        ({"do_sample": True, "top_k": 5}, {"do_sample": True, "top_k": 6}),
        ({"do_sample": True, "top_p": 0.5}, {"do_sample": True, "top_p": 0.6}),
        ({"do_sample": True, "num_beams": 2}, {"num_beams": 2}),
    ],
    ids=str,
)
def test_those_that_draw_from_the_same_are_prefilled_together(
    model: Any, one: dict[str, Any], other: dict[str, Any], prefilled: list[int]
) -> None:
    """Each draws with a generator of its own. What the others draw from is no matter of theirs."""
    executor = ContinuousBatches(model, 32)
    for options in (one, other):  # it is known that such enter
        run(executor, requests_for(model, PROMPTS[:1], 32, **options))
    ones, others = requests_for(model, PROMPTS, 32, **one), requests_for(model, PROMPTS, 32, **other)
    for number, request in enumerate(request for request in (*ones, *others) if request.seed is not None):
        request.seed = number
    prefilled.clear()
    run(executor, [*ones, *others], at_once=32)
    assert_as_alone(model, [*ones, *others], [*PROMPTS, *PROMPTS])
    assert len(prefilled) < sum(prefilled) == 2 * len(PROMPTS) and max(prefilled) <= len(PROMPTS)
    assert not (executor.counts["repeated"] or executor.alone)


@pytest.mark.parametrize(("ends", "together"), [(2, True), ([3, 2], True), (3, False), (None, False)])
def test_padding_that_ends_sequences_is_no_padding(llama: Any, ends: Any, together: bool, prefilled: list[int]) -> None:
    """Turns of a chat end with such a token. Where it ends nothing, the library leaves it out of a prompt."""
    executor = ContinuousBatches(llama, 16)
    options, prompts = {"pad_token_id": 2, "eos_token_id": ends}, [[5, 6, 2, 7, 8], [2, 9, 10], [30, 31, 2]]
    run(executor, requests_for(llama, PROMPTS[:1], **options))
    prefilled.clear()
    check(executor, prompts, at_once=8, **options)
    assert (prefilled == [3]) is together and bool(executor.alone) is not together


def test_numbers_that_print_alike_are_drawn_with_as_they_are(llama: Any) -> None:
    numbers = [torch.tensor(0.90001), torch.tensor(0.90004), np.float64(0.5), np.float64(0.5)]
    groups = [make(llama, [5, 6], None, {"do_sample": True, "top_p": each}, 1, 8).prefill_group for each in numbers]
    assert groups[0] != groups[1] and groups[2] == groups[3]
    suppressed = torch.arange(20, 150).repeat(10)
    others = torch.cat([suppressed[:600], torch.tensor([7]), suppressed[601:]])
    assert repr(suppressed) == repr(others)
    options = [{"suppress_tokens": each} for each in (suppressed, others)]
    one, other = (make(llama, [5, 6], None, {"max_new_tokens": 4, **each}, None, 8) for each in options)
    assert one.group != other.group and one.prefill_group != other.prefill_group


def test_arguments_that_say_nothing(llama: Any) -> None:
    """As `generate` takes None for them, a request with these shares what one without shares."""
    nothing = dict.fromkeys(("logits_processor", "stopping_criteria", "assistant_model", "prefix_allowed_tokens_fn"))
    one, other = (make(llama, [5, 6], None, {"max_new_tokens": 4, **each}, None, 8) for each in ({}, nothing))
    assert other.alone is None and (one.group, one.prefill_group) == (other.group, other.prefill_group)


def test_processors_that_slots_do_not_know_have_requests_enter_one_by_one(llama: Any, prefilled: list[int]) -> None:
    executor = ContinuousBatches(llama, 16)
    requests = requests_for(llama, PROMPTS, do_sample=True, top_h=0.5)
    run(executor, requests[:1])
    run(executor, requests[1:], at_once=8)
    assert_as_alone(llama, requests, PROMPTS)
    assert prefilled == [1] * len(PROMPTS) and not (executor.counts["repeated"] or executor.alone)


def _streamed(model: Any, prompts: list[list[int]], failing: dict[int, int], **options: Any) -> list[Request]:
    given = {"max_new_tokens": 20, "eos_token_id": None, **options}
    seed = 3 if "do_sample" in options else None
    return [
        make(model, prompt, None, {**given, "streamer": Streamer(failing.get(number, 1000))}, seed, 16)
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7}], ids=str)
def test_streams_are_prefilled_together(model: Any, options: dict[str, Any], prefilled: list[int]) -> None:
    """Each hears its prompt and its tokens, as alone; one that fails, at its prompt or later, fails alone."""
    executor = ContinuousBatches(model, 16)
    run(executor, _streamed(model, PROMPTS[:1], {}, **options))
    failing = {1: 0, 3: 1, 4: 7}
    prefilled.clear()
    requests = _streamed(model, PROMPTS, failing, **options)
    run(executor, requests, at_once=16)
    assert max(prefilled) > 1 and sum(prefilled) == len(PROMPTS)
    for number, (request, prompt) in enumerate(zip(requests, PROMPTS, strict=True)):
        own = _streamed(model, [prompt], {}, **options)[0].options
        with torch.random.fork_rng():
            torch.manual_seed(3)
            expected = alone(model, prompt, **own)
        heard = request.options["streamer"].heard
        assert heard == own["streamer"].heard[: failing.get(number, 1000)]
        if number in failing:
            assert isinstance(request.future.exception(0), LookupError)
        else:
            assert request.options["streamer"].is_over and torch.equal(request.future.result(0), expected)
    assert not (executor.counts["repeated"] or executor.alone or executor.busy)


@pytest.mark.parametrize("fails_behind", [False, True])
def test_what_a_prefill_of_streams_fails_with(llama: Any, fails_behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have heard nothing begin again, each for itself. Those that have fail: none hears a token twice."""
    executor, admit = ContinuousBatches(llama, 16), Slots.admit
    run(executor, _streamed(llama, PROMPTS[:1], {}))
    enter = Slots._enter

    def without_memory(step: Slots, *args: Any) -> None:
        if len(step.taken) == 2 and not fails_behind:
            raise MemoryError("cannot allocate memory")
        enter(step, *args)

    def failing(step: Slots, *args: Any) -> None:
        admit(step, *args)
        if fails_behind:
            raise MemoryError("cannot allocate memory")

    requests = _streamed(llama, PROMPTS[:4], {})
    with monkeypatch.context() as planted:
        planted.setattr(Slots, "_enter", without_memory)
        planted.setattr(Slots, "admit", failing)
        run(executor, requests, at_once=16)
    for request, prompt in zip(requests, PROMPTS, strict=False):
        own = _streamed(llama, [prompt], {})[0].options
        expected = alone(llama, prompt, **own)
        heard = request.options["streamer"].heard
        if fails_behind:
            assert isinstance(request.future.exception(0), MemoryError) and heard == own["streamer"].heard[:2]
        else:
            assert torch.equal(request.future.result(0), expected) and heard == own["streamer"].heard
    assert not executor.busy
