"""The user's processors and stopping criteria, which the host runs between two replays of a captured step."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

import fastgen
from tests.equivalence.captured import (
    BEAMS,
    GREEDY,
    Counting,
    build,
    captures,
    reasons,
    two,
)
from tests.equivalence.check import assert_same, check, run
from tests.equivalence.models import BY_NAME, Family


class Stopping(StoppingCriteria):
    """A criterion of the user's, with state: ends what has a token that depends on how often it has been called."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert scores is None
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -1] + len(self.lengths)) % 7 == 0


def criteria(encoder_decoder: bool = False) -> dict[str, Any]:
    """What each call gets: objects of its own."""
    return {
        "the user's": Stopping(),
        "a function": lambda ids, scores: (ids[:, -1] % 9 == 1) & (ids.shape[1] > 8),
        "a length": MaxLengthCriteria(9 if encoder_decoder else 53),
        "no time": MaxTimeCriteria(0.0),
        "much time": MaxTimeCriteria(1000.0),
    }


@two
@pytest.mark.parametrize("name", criteria())
def test_stopping_criteria(family: Family, name: str, device: torch.device) -> None:
    """The host runs them in every step, as often as the library does, and on the same continuations."""
    model, inputs = build(family, device)
    processors = {"logits_processor": LogitsProcessorList([Counting()])} if name == "the user's" else {}
    for decoding in (BEAMS, {**GREEDY, "eos_token_id": None}):
        seen = []
        for disabled in (True, False, False):
            criterion = criteria(family.encoder_decoder)[name]
            options = {**decoding, "stopping_criteria": StoppingCriteriaList([criterion]), **copy.deepcopy(processors)}
            with fastgen.disabled() if disabled else contextlib.nullcontext():
                seen.append((run(model, inputs, options), getattr(criterion, "lengths", None)))
        assert_same(*seen[:2])
        assert_same(seen[0], seen[2])
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
    threads: list[threading.Thread] = []

    class Waiting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            work = threading.Thread(target=other.generate, kwargs={**its_inputs, **GREEDY}, daemon=True)
            work.start()
            work.join(timeout=60)
            assert not work.is_alive(), "it waits for the call that waits for it"
            threads.append(work)
            return scores

    check(model, inputs, lambda: {**BEAMS, "logits_processor": LogitsProcessorList([Waiting()])})
    assert threads and captures() > len(threads) // 2


class Grammar(LogitsProcessor):
    """Keeps what it was called with where no copy of its attributes has it."""

    def __init__(self, seen: list[Any], change: Any) -> None:
        self.advance = lambda tokens: seen.append(tokens.tolist())
        self.change, self.length = change, lambda: len(seen)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.advance(input_ids)
        return self.change(scores.roll(self.length(), dims=-1), self.length())


class Noting(StoppingCriteria):
    def __init__(self, seen: list[Any]) -> None:
        self.note = lambda tokens: seen.append(tokens.tolist())

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.note(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


REFUSED = {
    "float64": lambda scores, calls: scores.double(),
    "float64 from the third call on": lambda scores, calls: scores.double() if calls > 2 else scores,
    "half of the columns": lambda scores, calls: scores[:, : scores.shape[1] // 2],
}


@pytest.mark.parametrize("options", [GREEDY, BEAMS, {**GREEDY, "do_sample": True}], ids=["greedy", "beams", "sampled"])
@pytest.mark.parametrize("what", REFUSED)
def test_scores_that_are_refused_are_asked_for_once(what: str, options: dict[str, Any], device: torch.device) -> None:
    if what.startswith("half") and options is not GREEDY:
        pytest.skip("the library wants all columns")
    if "third" in what and "do_sample" in options:
        pytest.skip("a graph draws other tokens than the library")
    model, inputs = build(BY_NAME["gpt2"], device)
    calls = []
    for context in (fastgen.disabled(), contextlib.nullcontext()):
        seen, noted = [], []
        code = {
            "logits_processor": LogitsProcessorList([Grammar(seen, REFUSED[what])]),
            "stopping_criteria": StoppingCriteriaList([Noting(noted)]),
        }
        with context:
            found = run(model, inputs, {**options, "min_new_tokens": 12, **code})
        calls.append((found.tolist(), seen, noted))
    assert calls[0] == calls[1]


def test_user_code_runs_in_the_mode_of_the_call(device: torch.device) -> None:
    """Its own tensors, made in inference mode, can be written to there."""
    model, inputs = build(BY_NAME["gpt2"], device)

    class Own(LogitsProcessor):
        def __init__(self) -> None:
            self.counts = None

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.counts is None:
                self.counts = torch.zeros_like(scores)
            self.counts.scatter_add_(1, input_ids[:, -1:], torch.ones_like(scores[:, :1]))
            return scores - self.counts

    with torch.inference_mode():
        check(model, inputs, lambda: {**GREEDY, "min_new_tokens": 24, "logits_processor": LogitsProcessorList([Own()])})
    assert captures() == 1, reasons()


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["rows", "beams"])
@pytest.mark.parametrize("at", [1, 5])
def test_what_the_users_code_raises_comes_of_nothing_of_ours(options: dict[str, Any], at: int) -> None:
    """Also where a captured step has been tried before, which the scores of the processor end."""

    class Raises(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > at:
                raise ZeroDivisionError("planted")
            return scores.double() if at == 1 else scores

    model, inputs = build(BY_NAME["llama"], torch.device("cpu"))
    for context in (fastgen.disabled(), contextlib.nullcontext()):
        with context, pytest.raises(ZeroDivisionError) as raised:
            run(model, inputs, {**options, "min_new_tokens": 12, "logits_processor": [Raises()]})
        assert raised.value.__context__ is None and raised.value.__cause__ is None
