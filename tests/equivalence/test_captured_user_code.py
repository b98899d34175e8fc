"""The user's processors and stopping criteria, which the host runs between two replays of a captured step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from tests.equivalence.captured import BEAMS, GREEDY, Counting, build, captures, reasons, two
from tests.equivalence.check import check
from tests.equivalence.models import BY_NAME, Family

CRITERIA: dict[str, Callable[[bool], Any]] = {
    "a function": lambda has_encoder: lambda ids, scores: (ids[:, -1] % 9 == 1) & (ids.shape[1] > 8),
    "one truth value": lambda has_encoder: lambda ids, scores: ids.shape[1] > (8 if has_encoder else 52),
    "a length": lambda has_encoder: MaxLengthCriteria(9 if has_encoder else 53),
    "no time": lambda has_encoder: MaxTimeCriteria(0.0),
    "much time": lambda has_encoder: MaxTimeCriteria(1000.0),
}


@two
@pytest.mark.parametrize("name", CRITERIA)
def test_stopping_criteria(family: Family, name: str, device: torch.device) -> None:
    """Beside a processor with a state."""
    model, inputs = build(family, device)
    for decoding in (BEAMS, {**GREEDY, "eos_token_id": None}):

        def options(decoding: dict[str, Any] = decoding) -> dict[str, Any]:
            criteria = StoppingCriteriaList([CRITERIA[name](family.encoder_decoder)])
            return {**decoding, "stopping_criteria": criteria, "logits_processor": LogitsProcessorList([Counting()])}

        for _ in range(2):
            check(model, inputs, options)
    assert captures() == 4, reasons()


@two
def test_stop_strings(family: Family, device: torch.device, tokenizer: Any) -> None:
    model, inputs = build(family, device)
    for decoding in (BEAMS, GREEDY):
        check(model, inputs, {**decoding, "stop_strings": ["ac", "ifa", "gg", "lb", "eed"], "tokenizer": tokenizer})
    assert captures() == 2, reasons()


def test_threads_that_the_users_code_waits_for(device: torch.device) -> None:
    """A processor may leave a call of another model to a thread, and wait for it."""
    (model, inputs), (other, its_inputs) = (build(BY_NAME[name], device) for name in ("gpt2", "llama"))
    its_call, threads = {**its_inputs, **GREEDY, "max_new_tokens": 8}, list[threading.Thread]()

    class Waiting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            work = threading.Thread(target=other.generate, kwargs=its_call, daemon=True)
            work.start()
            work.join(timeout=60)
            assert not work.is_alive(), "it waits for the call that waits for it"
            threads.append(work)
            return scores

    few = {**BEAMS, "max_new_tokens": 12}
    check(model, inputs, lambda: {**few, "logits_processor": LogitsProcessorList([Waiting()])})
    assert threads and captures() > len(threads) // 2
