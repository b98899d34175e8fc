"""An exception in accelerated code: the call is repeated with the original code, as if nothing had happened."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

import fastgen
from fastgen import memory, releases
from fastgen.decoding.kv import view as shared
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.kv.view import KVView
from fastgen.optimizer.transformers.cache import ExchangedLayers
from tests.equivalence.cases import BEAM, BEAM_SAMPLE, SAMPLE
from tests.equivalence.check import accelerated, assert_same, cache_with, fallbacks, run
from tests.equivalence.models import BY_NAME
from tests.equivalence.options import SCORES, SEQ2SEQ, any_decoding, decoders, every
from tests.equivalence.user_code import Listens

pytestmark = pytest.mark.sampled(4)


@pytest.fixture(autouse=True)
def uncaptured(counted: None) -> None:
    """A captured step that fails is dropped silently. These tests are about hooks."""
    fastgen.enable(captured_step="never")


def break_(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Makes the `at`-th call of a method, counted from 1, raise; the others work."""
    original, calls = vars(owner)[name], itertools.count(1)
    function = original.__func__ if isinstance(original, staticmethod) else original

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise ZeroDivisionError("planted")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, staticmethod(broken) if isinstance(original, staticmethod) else broken)


def assert_failed_once(record: pytest.WarningsRecorder) -> None:
    """Asserts that one warning and one fallback report the failure."""
    ours = [warning for warning in record if "FastGen" in str(warning.message)]
    assert len(ours) == 1
    assert issubclass(ours[0].category, RuntimeWarning)
    assert "ZeroDivisionError" in str(ours[0].message) and "planted" in str(ours[0].message)
    assert list(fallbacks().values()) == [1]
    assert "ZeroDivisionError" in next(iter(fallbacks()))
    assert accelerated() == 0


def assert_repeated(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Asserts that a call that fails there returns the original code's result. `call` makes objects of its own."""
    with fastgen.disabled():
        original = call()
    break_(monkeypatch, owner, name, at)
    with pytest.warns() as record:
        ours = call()
    assert_same(original, ours)
    assert_failed_once(record)


PLACES = {
    "before anything": (GrowingKV, "__init__", 1),
    "first layer of the prompt": (GrowingKV, "extend", 1),
    "second layer of the prompt": (GrowingKV, "extend", 2),
    "branching": (GrowingKV, "expand", 2),
    "first step": (GrowingKV, "extend", 5),
    "a later step": (GrowingKV, "extend", 13),
    "making the shared tensor": (KVView, "of", 3),
    "reordering": (GrowingKV, "reorder", 4),
    "handing over": (GrowingKV, "materialize", 2),  # the tokens are there, but the cache cannot be returned
}


@pytest.mark.sampled(8)
@any_decoding
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.replace(" ", "-"))
@every
def test_same_result(family: Any, place: str, decoding: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the random state after the call, from which the next one draws."""
    if (place == "reordering" and "num_beams" not in decoding) or not decoding:
        decoding = BEAM_SAMPLE  # nothing is reordered without beams, and nothing branches with one sequence

    def call() -> Any:
        return run(family.build(), family.make_inputs(), {**decoding, **SCORES}), torch.rand(2)

    assert_repeated(call, monkeypatch, *PLACES[place])


@decoders
def test_attention_fails(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shared.RULES, torch.nn.functional.scaled_dot_product_attention, shared._matmul)
    call = partial(run, family.build("eager"), family.make_inputs(), BEAM)
    assert_repeated(call, monkeypatch, shared, "shared_prefix_scores", 3)


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure, with its cause."""
    fastgen.enable(strict=True)
    break_(monkeypatch, GrowingKV, "extend", 5)
    with pytest.raises(fastgen.FallbackError, match="planted"):
        run(BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(), BEAM)


def test_out_of_memory_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original code needs even more memory."""
    memory.free_captured_steps()  # of other tests, without which the original code would have another try
    monkeypatch.setattr(GrowingKV, "extend", Mock(side_effect=torch.OutOfMemoryError("planted")))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        run(BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(), BEAM)
    assert fallbacks() == {}


# ---- objects of the user's


@pytest.mark.parametrize("at", [1, 5, 14])
@every
def test_streamer_is_not_fed_twice(family: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> list[Any]:
        mine = Listens()
        options = {"streamer": mine, "do_sample": True, "min_new_tokens": 9}
        run(family.build(), family.make_inputs(batch=1), lambda: options)
        return mine.heard

    assert_repeated(call, monkeypatch, GrowingKV, "extend", at)


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@decoders
def test_own_cache_is_intact(family: Any, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original code starts from the cache as the caller gave it."""
    model, inputs = family.build(), family.make_inputs(padding=None)

    def call() -> Any:
        cache = DynamicCache()
        if filled:
            cache_with(model, inputs["input_ids"][:, :6], cache)
            cache.batch_repeat_interleave(4)
        return run(model, inputs, lambda: {**BEAM, **SCORES, **releases.with_cache(cache)}), cache

    assert_repeated(call, monkeypatch, GrowingKV, "reorder", 7)


@pytest.mark.parametrize("family", SEQ2SEQ, ids=str)
def test_own_encoder_outputs_are_intact(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = family.build(), family.make_inputs()
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)

    def call() -> Any:
        mine = copy.deepcopy(encoded)
        result = model.generate(encoder_outputs=mine, attention_mask=inputs["attention_mask"], **BEAM, **SCORES)
        return result, mine

    assert_repeated(call, monkeypatch, GrowingKV, "extend", 9)


class Remembers(LogitsProcessor):
    """Scores depend on its state, which is of all kinds."""

    def __init__(self) -> None:
        self.calls, self.seen, self.counts, self.known = 0, [], {}, set()
        self.total = torch.zeros(3)
        self.last, self.often, self.lists = deque(maxlen=4), Counter(), defaultdict(list)
        self.mine = self.seen

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        self.seen.append([int(input_ids[0, -1])])
        self.counts[self.calls % 3] = self.counts.get(self.calls % 3, 0) + 1
        self.known.add(self.calls)
        self.last.append(self.calls)
        self.often[len(self.last)] += 1
        self.lists[self.calls % 2].append(self.last.copy())
        self.total += 1
        self.late = True
        return scores + (torch.arange(scores.shape[1]) == 5 + self.calls) * 3.0

    def allowed(self, row: int, tokens: Any) -> list[int]:
        self.calls += 1
        return list(range(3, 20 + self.calls % 100))


class Large(LogitsProcessor):
    """Holds what cannot be saved, or is too large to save: the call goes on all the same."""

    def __init__(self) -> None:
        self.circle: list[Any] = []
        self.circle.append(self.circle)
        self.table = torch.zeros(3).expand(4, 3)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


def test_state_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME["llama"]
    with fastgen.disabled():
        original = run(family.build(), family.make_inputs(), BEAM)
    many = Large()
    many.many = [list(range(100)) for _ in range(1000)]
    for mine in (Large(), many):
        options = {**BEAM, "logits_processor": [mine]}
        assert_same(original, run(family.build(), family.make_inputs(), lambda options=options: options))
    break_(monkeypatch, GrowingKV, "extend", 13)
    with pytest.warns(RuntimeWarning, match="planted"):
        assert_same(original, run(family.build(), family.make_inputs(), lambda: options))


class StopsAfter(StoppingCriteria):
    """Counts its calls instead of the tokens."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["processor", "criterion", "prefix method"])
@pytest.mark.parametrize("family", [BY_NAME["bart"], BY_NAME["llama"]], ids=str)
def test_state_of_the_users_objects_is_put_back(family: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> Any:
        if how == "criterion":
            mine: Any = StopsAfter(8)
            options = {**SAMPLE, "min_new_tokens": 8, "stopping_criteria": [mine]}
        else:
            mine = Remembers()
            plug = {"logits_processor": [mine]} if how == "processor" else {"prefix_allowed_tokens_fn": mine.allowed}
            options = {**BEAM, **plug}
        result = run(family.build(), family.make_inputs(), lambda: options)
        return result, {name: str(value) for name, value in vars(mine).items()}, getattr(mine, "mine", None)

    assert_repeated(call, monkeypatch, GrowingKV, "extend", 13)


def test_streamer_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if FastGen fails when the loop is over."""

    def call() -> list[Any]:
        mine, family = Listens(), BY_NAME["llama"]
        run(family.build(), family.make_inputs(batch=1), {"streamer": mine, "return_dict_in_generate": True})
        return mine.heard

    assert_repeated(call, monkeypatch, ExchangedLayers, "hand_over", 1)
