"""Speculative decoding does the work of each position as often, in the same order and with the same content."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import fastgen
from fastgen.decoding.speculation.draft_sources import PromptLookup
from fastgen.optimizer.transformers.captured import graph_cache, key
from fastgen.optimizer.transformers.speculation.decoding import Positions
from tests import near_ties
from tests.equivalence.captured import fail_at
from tests.equivalence.check import default_dtype
from tests.equivalence.models import SHORT
from tests.equivalence.others import made
from tests.equivalence.speculation import (
    GREEDY,
    KNOWN,
    LOOKUP,
    all_speculate,
    assert_speculates,
    counts,
    draft_of,
    not_used,
    same,
    speculates,
)
from tests.equivalence.user_code import Listens

pytestmark = [pytest.mark.usefixtures("speculates_at_once", "any_lengths"), pytest.mark.sampled(4)]
RETURNS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class Ends(StoppingCriteria):
    """Ends sequences at these tokens, and all of them at a length; keeps what it sees."""

    def __init__(self, tokens: tuple[int, ...], all_at: int = 10**6) -> None:
        self.tokens, self.all_at, self.seen = torch.tensor(tokens), all_at, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.isin(input_ids[:, -1], self.tokens) | (input_ids.shape[1] >= self.all_at)


@pytest.mark.parametrize("name, draft", [("llama", "int8"), ("llama", "assistant"), ("bart", "lookup"), ("t5", "int8")])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_returned_scores(name: str, draft: str, default: torch.dtype) -> None:
    """Also with processors, where scores and logits differ, and with another default dtype of torch."""
    model = KNOWN[name].build()
    asked = draft_of(draft, model)
    for options in ({**RETURNS, "repetition_penalty": 1.3}, {**RETURNS, "output_logits": False}):
        for batch in (1, 3):
            # The library returns scores of rows that have ended, too.
            eos = {} if batch == 1 else {"eos_token_id": None}
            with default_dtype(default):
                same(model, KNOWN[name].make_inputs(batch), {**options, **eos}, **asked)
    assert_speculates(4)


@pytest.mark.parametrize("name", ["llama", "whisper"])
@pytest.mark.parametrize("batch", [1, 4])
def test_streamer(name: str, batch: int) -> None:
    model, inputs = made(name, batch)
    fastgen.enable(self_speculation="int8")

    def call() -> Any:
        watcher = Listens()
        return model.generate(**inputs, **GREEDY, streamer=watcher), watcher.heard

    for _ in range(2):
        near_ties.check(call)
    assert_speculates(2)


@pytest.mark.parametrize("user", ["streamer", "criterion"])
def test_the_users_code_gets_what_the_librarys_drafts_give_it(user: str) -> None:
    """All tokens that a verify has accepted, at once. FastGen's drafts differ, so the library drafts."""
    model, inputs = made("llama", 1)
    inputs = {name: value.repeat(1, 3) for name, value in inputs.items()}  # so that a lookup finds something

    def call() -> Any:
        watcher, ends = Listens(), Ends(tuple(range(40, 60)))
        given = {"streamer": watcher} if user == "streamer" else {"stopping_criteria": StoppingCriteriaList([ends])}
        return model.generate(**inputs, **GREEDY, **given, **LOOKUP), watcher.heard, ends.seen

    for _ in range(2):
        near_ties.check(call)
    assert counts()["accelerated"] == 0


def test_a_streamer_is_not_fed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify fails after some tokens. Plain steps go on; if they fail, too, the library's loop does."""
    model, inputs = made("llama", 1)
    plain = Listens()
    with fastgen.disabled():
        model.generate(**inputs, **GREEDY, streamer=plain)
    take, calls = Positions.take, list[int]()

    def fails(self: Positions, step: Any) -> None:
        take(self, step)
        calls.append(len(watcher.heard))
        if len(calls) == 4:
            raise RuntimeError("planted")

    monkeypatch.setattr(Positions, "take", fails)
    fastgen.enable(self_speculation="int8")
    for plain_after in (None, 2, 6):
        watcher = Listens()
        calls.clear()
        with monkeypatch.context() as patch:
            steps = fail_at(patch, plain_after)
            model.generate(**inputs, **GREEDY, streamer=watcher)
        assert calls[-1] > 4 and (plain_after is None or len(steps) == plain_after)
        assert watcher.heard == plain.heard
    assert not_used() == {"RuntimeError: planted": 3}


def test_what_a_streamer_raises_is_passed_on() -> None:
    class Fails(Listens):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.heard) == 6:
                raise ZeroDivisionError

    model, inputs = made("llama", 1)
    fastgen.enable(self_speculation="int8")
    watcher = Fails()
    with pytest.raises(ZeroDivisionError):
        model.generate(**inputs, **GREEDY, streamer=watcher)
    assert len(watcher.heard) == 6


@pytest.mark.parametrize("name, draft", [("llama", "assistant"), ("llama", "lookup"), ("bart", "int8")])
@pytest.mark.parametrize("batch", [1, 4])
def test_stop_strings(name: str, batch: int, draft: str, tokenizer: Any) -> None:
    """The library refuses them for batches of an assisted call."""
    stops = {"stop_strings": ["ac", "ifa", "gg", "lb", "eed"], "tokenizer": tokenizer}
    speculates(name, draft, stops, batches=(batch, batch))


@pytest.mark.parametrize("options", [{}, {"eos_token_id": None}, RETURNS | {"eos_token_id": None}], ids=str)
@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("batch", [1, 4])
def test_criteria(name: str, batch: int, options: dict[str, Any]) -> None:
    """Called once for each position, with the sequences of all rows up to there, padded after their ends."""
    model, inputs = made(name, batch)
    with fastgen.disabled():
        said = model.generate(**inputs, **GREEDY)
    length = said.shape[1]
    some = tuple(said[:, -GREEDY["max_new_tokens"] // 2].tolist())
    fastgen.enable(self_speculation="int8")
    for criterion in (Ends(some), Ends(some[:1], length - 4)):

        def call(criterion: Ends = criterion) -> Any:
            own = copy.deepcopy(criterion)
            return model.generate(**inputs, **{**GREEDY, **options}, stopping_criteria=[own]), own.seen

        for _ in range(2):
            near_ties.check(call)
    assert_speculates(4)


def test_max_time() -> None:
    model, inputs = made("llama", 3, SHORT)
    fastgen.enable(self_speculation="int8")
    same(model, inputs, {"max_time": 60.0})
    same(*made("llama", 1), {"max_time": 60.0}, prompt_lookup_num_tokens=3)
    assert_speculates(2)
    assert model.generate(**inputs, **GREEDY, max_time=0.0).shape[1] == SHORT + 1


def test_a_criterion_and_a_buffer_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has been cut stays inside the buffers."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 13)
    monkeypatch.setattr(key, "_NEW_ON_CPU", (13, 3))
    model, inputs = made("llama", 4)
    options = {**GREEDY, "max_new_tokens": 60, "min_new_tokens": 50}
    with fastgen.disabled():
        said = model.generate(**inputs, **options)[:, -45:-43]
    fastgen.enable(self_speculation="int8")
    criteria = StoppingCriteriaList([Ends(tuple(said[0].tolist()))])
    all_speculate(model, inputs, {**options, "stopping_criteria": criteria})


def test_what_a_row_has_stored_before_it_was_cut_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call has to clear it. Here one row is far ahead of the other when a criterion ends both."""
    (model, inputs), length = made("llama", 2), 60
    options = {**GREEDY, "max_new_tokens": length, "eos_token_id": None}
    with fastgen.disabled():
        said = model.generate(**inputs, **options)[0, -length:].tolist()

    def propose(self: PromptLookup, row: int, most: int) -> tuple[list[int], int]:
        known = len(self._rows[row]._tokens) - int(inputs["attention_mask"][row].sum())
        return (said[known : known + most], 1) if row == 0 else ([], 0)

    monkeypatch.setattr(PromptLookup, "propose", propose)
    end = inputs["input_ids"].shape[1] + 6
    model.generate(**inputs, **options, prompt_lookup_num_tokens=8, stopping_criteria=[Ends((), end)])
    assert_speculates(1)
    ((step,),) = [[*kept.steps.values()] for kept in graph_cache._models.values()]
    stored = [int(own.count_nonzero(dim=(0, 1, 3)).nonzero().max()) + 1 for kv in step.buffers.own for own in kv.suffix]
    assert int(step.buffers.position.suffix_lengths.max()) < max(stored) <= step.buffers.position.max_length()


def test_sampling_with_criteria_and_scores() -> None:
    """The tokens were drawn by these scores."""
    model, inputs = made("llama", 1)
    fastgen.enable(self_speculation="int8")
    torch.manual_seed(1)
    options = {"do_sample": True, "top_k": 4, "max_new_tokens": 20, **RETURNS}
    found = model.generate(**inputs, **options)
    assert_speculates(1)
    new = found.sequences[:, inputs["input_ids"].shape[1] :]
    assert len(found.scores) == len(found.logits) == new.shape[1]
    with fastgen.disabled():
        logits = model(found.sequences).logits[:, -new.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, atol=near_ties.ATOL, rtol=near_ties.RTOL)
    scores = torch.stack(found.scores, 1)
    assert bool((scores.isfinite().sum(2) == 4).all())
    assert bool(scores.gather(2, new.unsqueeze(2)).isfinite().all())
