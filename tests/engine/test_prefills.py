"""Prefills of requests that enter slots: beginnings and sources that they share, chunks, and how many at a time."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.slots import Slots
from tests.engine.conftest import PROMPTS, assert_as_alone, requests_for, run
from tests.equivalence.models import BY_NAME


def test_beginnings_are_prefilled_once(llama: Any) -> None:
    beginning, random_numbers = [random.Random(1).randrange(5, 150) for _ in range(100)], random.Random(2)
    prompts = [beginning + [random_numbers.randrange(5, 150) for _ in range(n)] for n in (3, 8, 1, 20, 40)]
    executor = ContinuousBatches(llama, 8)
    requests = requests_for(llama, prompts)
    run(executor, requests, at_once=8)
    assert_as_alone(llama, requests, prompts)
    assert executor.stats()["shared_positions"] == 4 * 96
    with torch.no_grad():
        llama.get_input_embeddings().weight.neg_()  # what is known of the old model is of no use any more
    again = requests_for(llama, prompts)
    run(executor, again)
    assert_as_alone(llama, again, prompts)


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
    again = requests_for(model, prompts, num_beams=2, max_new_tokens=8)
    run(executor, again, at_once=8)
    assert_as_alone(model, again, prompts)
    assert executor.stats()["shared_sources"] == 10


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_a_long_prompt_is_prefilled_in_chunks(name: str) -> None:
    """Others go on between them."""
    model = BY_NAME[name].build()
    executor = ContinuousBatches(model, 8, max_stall=0.0)
    prompts = [PROMPTS[0], list(range(40, 130)), list(range(10, 150)), [5, 9, 3] * 50, [7, 8, 9] * 50]
    requests = requests_for(model, prompts, max_new_tokens=40, eos_token_id=None)
    run(executor, requests)
    assert_as_alone(model, requests, prompts)
    assert executor.stats()["chunks"] >= 3 and not executor.counts["repeated"] and not executor.alone


def test_the_first_long_prompt_is_prefilled_in_chunks(llama: Any) -> None:
    """Nobody knows how long tokens take: prompts before it were too short to tell."""
    executor, prompts = ContinuousBatches(llama, 8, max_stall=3600.0), [PROMPTS[0], list(range(10, 150))]
    requests = requests_for(llama, prompts, max_new_tokens=40, eos_token_id=None)
    run(executor, requests)
    assert_as_alone(llama, requests, prompts)
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


@pytest.mark.parametrize(("max_stall", "together"), [(0.0, 1), (3600.0, 5), (None, 5)])
def test_how_many_are_prefilled_together(max_stall: float | None, together: int) -> None:
    """No more than take a part of the stall that may be, and others go on before the next ones."""
    model = BY_NAME["llama"].build()
    executor = ContinuousBatches(model, 16, max_stall=max_stall)
    known = [list(range(10, 100))]
    run(executor, requests_for(model, known))
    prompts = [list(range(begin, begin + 40)) for begin in range(5, 10)]
    left, steps = requests_for(model, prompts), list[int]()
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
