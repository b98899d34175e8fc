"""Calls as a chat makes them, with captured steps: their tokens are streamed, and go on in a cache of the user's."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, StoppingCriteria, StoppingCriteriaList

import fastgen
from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.optimizer.transformers.captured import key
from tests import near_ties
from tests.equivalence.captured import captures, fail_at, reasons
from tests.equivalence.check import accelerated, cache_with, chat, fallbacks
from tests.equivalence.models import BY_NAME, EOS
from tests.equivalence.user_code import Listens, MyError

NEW: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
needs_order = pytest.mark.skipif(not releases.streams_behind_criteria(), reason="this release asks criteria afterwards")


pytestmark = [
    pytest.mark.usefixtures("way"),
]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have to grow in the middle of a call."""
    monkeypatch.setattr(key, "_FIRST_NEW", 8)
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 8)


def _both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives without FastGen, and with it."""
    with fastgen.disabled():
        expected = call()
    return expected, call()


class Hears(Listens):
    """Raises at one of its tokens, or at the end. In front of them, it hears the prompt."""

    def __init__(self, at: int | None = None, error: type[BaseException] = MyError) -> None:
        super().__init__()
        self.at, self.error = at, error

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.heard) - 2 == self.at:
            raise self.error

    def end(self) -> None:
        super().end()
        if self.at == -1:
            raise MyError


class Ends(StoppingCriteria):
    """Ends rows at some tokens, and notes between which of those that are streamed it is asked."""

    def __init__(self, heard: list[Any]) -> None:
        self.heard = heard

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.heard.append(("criterion", input_ids.shape[1]))
        return input_ids[:, -1] % 11 == 3


STREAMED = {
    "greedy": {},
    "no end": {"eos_token_id": None},
    "ends": {"eos_token_id": list(range(11, 40))},
    "ends at once": {"max_new_tokens": 12, "forced_eos_token_id": EOS, "eos_token_id": list(range(3, 200))},
    "one token": {"max_new_tokens": 9, "min_new_tokens": 9},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "sampling": {"do_sample": True},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("options", STREAMED)
@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.usefixtures("small_buffers")
def test_what_a_streamer_hears(name: str, batch: int, options: str, way: str) -> None:
    """The same tokens in the same order, also where the buffers grow meanwhile, and rows end before others."""
    model, inputs, draws = BY_NAME[name].build(), BY_NAME[name].make_inputs(batch), "do_sample" in STREAMED[options]

    def call() -> Any:
        torch.manual_seed(1)
        streamer = Hears()
        result = model.generate(**inputs, **{**NEW, **STREAMED[options]}, streamer=streamer)
        return streamer.heard, (result if isinstance(result, torch.Tensor) else result.sequences).tolist()

    expected, found = _both(call)
    if draws and way == "graphs":
        assert found == expected and reasons() == {"a streamer of samples": 1}
        return
    assert found == expected
    assert captures() == 1, reasons()


@needs_order
@pytest.mark.parametrize("batch", [1, 3])
def test_a_streamer_between_criteria(batch: int) -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(batch)

    def call() -> Any:
        streamer = Hears()
        criteria = StoppingCriteriaList([Ends(streamer.heard)])
        return model.generate(**inputs, **NEW, streamer=streamer, stopping_criteria=criteria).tolist(), streamer.heard

    expected, found = _both(call)
    assert found == expected
    assert captures() == 1, reasons()


@pytest.mark.parametrize("at", [0, 1, 7, 23, -1])
def test_what_a_streamer_raises_is_passed_on(at: int) -> None:
    """It has heard the same until then, and the next call is none the worse."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1)

    def call() -> Any:
        streamer = Hears(at)
        with pytest.raises(MyError):
            model.generate(**inputs, **NEW, eos_token_id=None, streamer=streamer)
        return streamer.heard

    expected, found = _both(call)
    assert found == expected
    plain = _both(lambda: model.generate(**inputs, **NEW).tolist())
    assert plain[0] == plain[1] and not fallbacks()


@pytest.mark.parametrize("after", [1, 3, 9])
@pytest.mark.parametrize("samples", [False, True])
def test_a_streamer_is_not_fed_twice(after: int, samples: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails when some tokens have been put; the library's loop puts what comes behind."""
    if samples and way == "graphs":
        pytest.skip("samples are not streamed there")
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1)
    steps = fail_at(monkeypatch, after)

    def call() -> Any:
        torch.manual_seed(1)
        streamer = Hears()
        options = {**NEW, "do_sample": samples, "eos_token_id": None}
        return model.generate(**inputs, **options, streamer=streamer).tolist(), streamer.heard

    expected, found = _both(call)
    assert found == expected and len(steps) == after
    assert reasons() == {"RuntimeError: planted": 1}


def test_no_token_is_streamed_that_is_drawn_from_nothing(way: str) -> None:
    """Probabilities that are not numbers: the library raises before it has a token."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1)
    length = inputs["input_ids"].shape[1]

    def spoils(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * (torch.nan if input_ids.shape[1] == length + 9 else 1.0)

    def call() -> Any:
        torch.manual_seed(1)
        streamer, options = Hears(), {**NEW, "do_sample": True, "eos_token_id": None, "logits_processor": [spoils]}
        with pytest.raises(RuntimeError, match="nan"):
            model.generate(**inputs, **options, streamer=streamer)
        return streamer.heard

    expected, found = _both(call)
    assert found == expected and len(found) == 10


def test_streamed_tensors_are_those_of_the_calls_mode() -> None:
    """Of inference, where the call is made in it; and each put has one of its own."""
    kept: list[torch.Tensor] = []

    class Keeps(Listens):
        def put(self, value: torch.Tensor) -> None:
            kept.append(value)

    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1)
    for mode in (torch.inference_mode, torch.no_grad):
        kept.clear()
        with mode():
            result = model.generate(**inputs, **NEW, eos_token_id=None, streamer=Keeps())
        assert {each.is_inference() for each in kept[1:]} == {mode is torch.inference_mode}
        assert {each.dtype for each in kept} == {torch.int64}
        assert torch.cat(kept[1:]).tolist() == result[0, inputs["input_ids"].shape[1] :].tolist()
    assert captures() == 2, reasons()


def test_the_librarys_own_streamer_in_a_thread(tokenizer: Any) -> None:
    """As most programs stream: text arrives while the call runs."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1)

    def call(disabled: bool) -> str:
        streamer = transformers.TextIteratorStreamer(tokenizer, timeout=60)
        errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                with fastgen.disabled() if disabled else contextlib.nullcontext():
                    model.generate(**inputs, **NEW, streamer=streamer)
            except BaseException as error:
                errors.put(error)
                streamer.end()

        thread = threading.Thread(target=run)
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert errors.empty(), errors.get()
        return text

    assert call(disabled=True) == call(disabled=False) != ""
    assert captures() == 1, reasons()


# ---- a cache of the user's


def _cache(model: Any) -> Any:
    if not model.config.is_encoder_decoder:
        return DynamicCache(config=model.config)
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


@pytest.mark.parametrize(
    ("options", "streams"),
    [({}, False), ({}, True), ({"do_sample": True}, False), ({"do_sample": True}, True), ({"num_beams": 3}, False)],
    ids=["greedy", "greedy-streamed", "sampling", "sampling-streamed", "beams"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom"])
def test_turns_of_a_chat(
    name: str, options: dict[str, Any], streams: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes on behind the cache of the last one: what that holds is what the library would have left there."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 8)
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(1, padding=None)
    turns = 1 if "num_beams" in options else 3

    def of_turn(turn: int) -> dict[str, Any]:
        given = {"streamer": transformers.TextStreamer(tokenizer)} if streams else {}
        return {**NEW, "max_new_tokens": 10 + turn, "eos_token_id": None, **options, **given}

    def call() -> Any:
        torch.manual_seed(1)
        cache = _cache(model)
        return chat(model, inputs["input_ids"], cache, of_turn, turns), cache

    near_ties.check(call)
    assert accelerated() == captures() == turns, (reasons(), fallbacks())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_an_encoder_decoders_cache(name: str, options: dict[str, Any]) -> None:
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(2)

    def call() -> Any:
        cache = _cache(model)
        result = model.generate(**inputs, **NEW, **options, eos_token_id=None, **releases.with_cache(cache))
        return result, cache

    near_ties.check(call)
    assert captures() == 1, reasons()


@pytest.mark.parametrize("padding", ["left", None])
def test_rows_of_a_cache_that_end_one_by_one(padding: str | None) -> None:
    """Those that are over go on in the library, and store what fills them up."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(4, padding=padding)

    def call() -> Any:
        cache = _cache(model)
        ends = {"eos_token_id": list(range(11, 40))}
        result = model.generate(**inputs, **NEW, **ends, **releases.with_cache(cache))
        return result, cache

    near_ties.check(call)
    assert captures() == 1, reasons()


def test_a_streamer_of_the_users_may_look_into_the_cache() -> None:
    """So the steps of such a call are the library's."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1)

    class Looks(Listens):
        def __init__(self, cache: Any) -> None:
            super().__init__()
            self.cache = cache

        def put(self, value: torch.Tensor) -> None:
            self.heard.append((value.tolist(), self.cache.get_seq_length()))

    def call() -> Any:
        streamer = Looks(_cache(model))
        model.generate(**inputs, **NEW, streamer=streamer, **releases.with_cache(streamer.cache))
        return streamer.heard

    expected, found = _both(call)
    assert found == expected and not captures()


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("error", [MyError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [0, 1, 5, 12, 22])
@pytest.mark.usefixtures("small_buffers")
def test_a_cache_behind_a_streamer_that_raises(
    at: int, error: type[BaseException], filled: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what the library would have stored until then: another call goes on with it. Buffers grow meanwhile."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1, padding=None)
    monkeypatch.setattr(transformers.TextStreamer, "put", lambda self, value: self.hears.put(value))

    def call() -> Any:
        cache, streamer = _cache(model), transformers.TextStreamer(tokenizer)
        if filled:
            cache_with(model, inputs["input_ids"][:, :6], cache)
        streamer.hears = Hears(at, error)
        with pytest.raises(error):
            model.generate(**inputs, **NEW, eos_token_id=None, streamer=streamer, **releases.with_cache(cache))
        return cache, cache.get_seq_length()

    near_ties.check(call)
    assert not fallbacks()


@pytest.mark.parametrize("at", [1, 6, 13])
def test_a_cache_behind_an_interrupt(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of a step, without a streamer: the cache has all whole steps."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1, padding=None)
    cache = _cache(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        fail_at(patch, at, KeyboardInterrupt)
        model.generate(**inputs, **NEW, eos_token_id=None, **releases.with_cache(cache))
    length = inputs["input_ids"].shape[1]
    assert cache.get_seq_length() == length + at - 1

    whole = cache_with(model, model.generate(**inputs, **NEW, eos_token_id=None)[:, : length + at - 1])
    for found, expected in zip(cache.layers, whole.layers, strict=True):
        torch.testing.assert_close(found.keys, expected.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("after", [1, 4, 9])
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_a_cache_behind_a_step_that_fails(after: int, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's loop goes on from the prefill, and the cache is that of its call."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs(1, padding=None)
    steps = fail_at(monkeypatch, after)

    def call() -> Any:
        cache = _cache(model)
        if filled:
            cache_with(model, inputs["input_ids"][:, :6], cache)
        return model.generate(**inputs, **NEW, eos_token_id=None, **releases.with_cache(cache)), cache

    near_ties.check(call)
    assert len(steps) == after and reasons() == {"RuntimeError: planted": 1}


def test_graphs_are_simulated(way: str, device: torch.device) -> None:
    """So that both ways are what they are called."""
    assert graph.is_recorded(device) == (way == "programs")
