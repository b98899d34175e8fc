"""Models with a `generate` of their own: what it asks the library's for shares steps, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

import fastgen
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make, make_inner
from fastgen.engine.waiting import turns
from tests.engine.conftest import WAIT, Bans, Gate, Streamer, assert_alone, raising
from tests.equivalence.composites import MODELS, build
from tests.equivalence.models import BY_NAME

# Whisper's windows of this many frames; recordings of one window, and of several, the last of them short.
WINDOW = 2 * BY_NAME["whisper"].build().config.max_source_positions
LENGTHS = [2 * WINDOW + 10, WINDOW, WINDOW + 30, 3 * WINDOW]
CHECKED = {"logprob_threshold": -1.0, "compression_ratio_threshold": 1.35, "temperature": (0.0,)}


@pytest.fixture
def whisper() -> Any:
    """It writes timestamps."""
    model = copy.deepcopy(BY_NAME["whisper"].build())
    model.generation_config.no_timestamps_token_id = model.config.vocab_size - 60
    return model


def recordings(*frames: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    features = [torch.randn(1, 8, length, generator=draw) for length in frames]
    return [{"input_features": each, "attention_mask": each.new_ones(1, each.shape[2]).long()} for each in features]


SHORT = recordings(*[WINDOW] * 4)


def threads_left() -> bool:
    """Whether threads of calls are there, a moment after the last of them."""
    end = time.monotonic() + WAIT
    while any(each.name == "fastgen-generate" for each in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    return any(each.name == "fastgen-generate" for each in threading.enumerate())


def assert_same(expected: Any, found: Any) -> None:
    """Tokens are the same, and scores within rounding; the cache is not returned."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    elif isinstance(expected, dict):
        names = expected.keys() - {"cache", "past_key_values"}
        assert names == found.keys() - {"cache", "past_key_values"}
        for name in names:
            assert_same(expected[name], found[name])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    else:
        assert expected == found


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"max_new_tokens": 9, "repetition_penalty": 1.3}], ids=str)
def test_recordings_share_steps(whisper: Any, options: dict[str, Any]) -> None:
    with fastgen.Engine(whisper, slots=16) as engine:
        results = engine.generate(SHORT, **options)
        stats = engine.stats()
    assert_alone(whisper, SHORT, results, **options)
    assert stats["busy_row_steps"] > stats["steps"] * options.get("num_beams", 1) and not stats["alone"]
    assert not threads_left()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_segments": True, "num_beams": 2},
        {"return_segments": True, "condition_on_prev_tokens": True, "no_speech_threshold": 0.6, **CHECKED},
    ],
    ids=["greedy", "beams", "checked"],
)
def test_long_recordings(whisper: Any, options: dict[str, Any]) -> None:
    """Each of their windows is a call, which may depend on the ones before."""
    inputs, options = recordings(*LENGTHS), {"return_timestamps": True, "max_new_tokens": 12, **options}
    with fastgen.disabled():
        expected = [whisper.generate(**copy.deepcopy(each), **options) for each in inputs]
    with fastgen.Engine(whisper, slots=16) as engine:
        found = engine.generate(inputs, **options)
        stats = engine.stats()
    assert_same(expected, found)
    assert stats["batches"] > len(inputs) and stats["busy_row_steps"] > stats["steps"] and not stats["alone"]


def test_seeds_and_what_changes_the_model_run_alone(whisper: Any) -> None:
    drawn = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 12}
    with fastgen.Engine(whisper) as engine:
        found = engine.submit(SHORT[0], seed=11, **drawn).result(WAIT)
        twice = engine.submit(SHORT[0], num_return_sequences=2, num_beams=2).result(WAIT)
        assert sum(engine.stats()["alone"].values()) == 2
    torch.manual_seed(11)
    assert torch.equal(found, whisper.generate(**copy.deepcopy(SHORT[0]), **drawn))
    assert torch.equal(twice, whisper.generate(**copy.deepcopy(SHORT[0]), num_return_sequences=2, num_beams=2))


def test_a_part_of_the_model_generates() -> None:
    """Its requests have seeds and code of their own, and one with more rows than the engine has runs alone."""
    make_model, inputs = MODELS["blip 2 with opt"]
    model, given = build(make_model), {name: value[:1] for name, value in inputs().items()}
    banned, drawn = int(model.generate(**copy.deepcopy(given))[0, -1]), {"do_sample": True, "temperature": 2.0}
    options: list[dict[str, Any]] = [
        {}, {**drawn, "seed": 5}, {**drawn, "seed": 6, "num_return_sequences": 2},
        {"logits_processor": [Bans(banned)]}, {"streamer": Streamer()}, {**drawn, "num_beams": 9, "seed": 7},
    ]  # fmt: skip
    with fastgen.Engine(model, slots=8) as engine, engine.paused():
        waiting = [engine.submit(given, **each) for each in options]
        failed = engine.submit(given, logits_processor=[Bans(banned, fails_at=3)])
    results, streamed = [each.result(WAIT) for each in waiting], options[4].pop("streamer")
    with pytest.raises(LookupError, match="of the user's"):
        failed.result(WAIT)
    stats = engine.stats()
    assert stats["alone"] == {"Blip2ForConditionalGeneration has a generate of its own": 1}
    assert stats["busy_row_steps"] > stats["steps"]
    for each, result in zip(options, results, strict=True):
        torch.manual_seed(each.pop("seed", 0))
        assert_alone(model, [given], [result], **each)
    model.generate(**copy.deepcopy(given), streamer=(alike := Streamer()))
    assert streamed.heard == alike.heard and streamed.is_over
    assert not threads_left()


def test_a_part_or_a_generate_that_the_user_exchanges() -> None:
    """A part that was exchanged is not the one whose steps the engine runs; a `generate` of the user's may draw."""
    make_model, inputs = MODELS["blip 2 with opt"]
    model, other = copy.deepcopy(build(make_model)), copy.deepcopy(build(make_model))
    given = {name: value[:1] for name, value in inputs().items()}
    with torch.no_grad():
        for weight in other.language_model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.1)
    with fastgen.Engine(model, slots=8) as engine:
        assert_alone(model, [given], [engine.submit(given).result(WAIT)])
        model.language_model = other.language_model
        assert_alone(model, [given], [engine.submit(given).result(WAIT)])

    def draws_too(*arguments: Any, **named: Any) -> Any:
        torch.rand(3)
        return type(model).generate(model, *arguments, **named)

    model.generate = draws_too
    options = {"do_sample": True, "temperature": 2.0}
    with fastgen.Engine(model, slots=8) as engine:
        result = engine.submit(given, seed=5, **options).result(WAIT)
    torch.manual_seed(5)
    assert torch.equal(result, model.generate(**copy.deepcopy(given), **options))


def test_code_of_the_user_sees_its_own_request(whisper: Any) -> None:
    """One that raises fails alone."""
    banned = int(whisper.generate(**copy.deepcopy(SHORT[0]))[0, 1])
    own, streamer, failing = Bans(banned), Streamer(), Bans(banned, fails_at=3)
    with fastgen.Engine(whisper, slots=8) as engine, engine.paused():
        plain = engine.submit(SHORT[1])
        first = engine.submit(SHORT[0], logits_processor=[own])
        failed = engine.submit(SHORT[2], logits_processor=[failing])
        streamed = engine.submit(SHORT[3], streamer=streamer)
    with pytest.raises(LookupError, match="of the user's"):
        failed.result(WAIT)
    alike, alike_streamer = Bans(banned), Streamer()
    assert_alone(whisper, [SHORT[0]], [first.result(WAIT)], logits_processor=[alike])
    assert_alone(whisper, [SHORT[1]], [plain.result(WAIT)])
    assert_alone(whisper, [SHORT[3]], [streamed.result(WAIT)], streamer=alike_streamer)
    assert own.seen == alike.seen and len(failing.seen) == 3
    assert streamer.heard == alike_streamer.heard and streamer.is_over
    assert not threads_left()


def test_a_request_is_cancelled_between_two_tokens(whisper: Any, gate: Gate) -> None:
    with fastgen.Engine(whisper, slots=8) as engine:
        waits = engine.submit(SHORT[0], logits_processor=[gate])
        assert gate.has_come.wait(WAIT)
        others = [engine.submit(each) for each in SHORT[1:]]
        assert waits.cancel()
        gate.may_go.set()
        assert_alone(whisper, SHORT[1:], [each.result(WAIT) for each in others])
        assert engine.stats()["cancelled"] == 1
    assert gate.calls == 1 and not threads_left()


def test_a_closed_engine_leaves_no_thread(whisper: Any, gate: Gate) -> None:
    engine = fastgen.Engine(whisper, slots=8)
    requests = [engine.submit(each, logits_processor=[gate]) for each in SHORT]
    assert gate.has_come.wait(WAIT)
    engine.close(wait=False, cancel=True)
    gate.may_go.set()
    assert all(each.cancelled() for each in requests) and not threads_left() and gate.calls == 1


def test_the_model_changes_between_two_windows(whisper: Any) -> None:
    """What has begun begins again: no result is of two models."""
    cut, windows = whisper._get_input_segment, list[int]()

    def noted(**given: Any) -> torch.Tensor:
        windows.append(given["cur_bsz"])
        segment: torch.Tensor = cut(**given)
        return segment

    class Changes(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if len(windows) == 3 and not windows.count(0):  # its own, and two of the other recording
                windows.append(0)
                with torch.no_grad():
                    whisper.model.decoder.embed_tokens.weight.mul_(-1.0)
            return scores

    (recording,), options = recordings(2 * WINDOW), {"return_timestamps": True, "max_new_tokens": 8}
    whisper._get_input_segment = noted
    with fastgen.Engine(whisper, slots=8) as engine, engine.paused():
        changes = engine.submit(SHORT[0], logits_processor=[Changes()], max_new_tokens=50, eos_token_id=None)
        other = engine.submit(recording, **options)
    with pytest.raises(RuntimeError, match="changed"):  # its code has seen the request
        changes.result(WAIT)
    assert 0 in windows
    assert_alone(whisper, [recording], [other.result(WAIT)], **options)
    assert not threads_left()


def test_adapters(whisper: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(whisper, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with fastgen.Engine(model.eval(), slots=8) as engine:
        results = engine.generate(SHORT, num_beams=2)
        stats = engine.stats()
    assert_alone(model, SHORT, results, num_beams=2)
    assert stats["busy_row_steps"] > 2 * stats["steps"] and not stats["alone"]


def test_a_budget_holds(whisper: Any) -> None:
    """The last ones begin again when room gets short."""
    options: dict[str, Any] = {"max_new_tokens": 40, "begin_suppress_tokens": None, "eos_token_id": None}
    probe = ContinuousBatches(whisper, 16)
    requests = [make(whisper, each, None, options, None, 16) for each in SHORT]
    for _ in turns(probe, requests):
        pass
    with fastgen.Engine(whisper, slots=16, cache_gib=probe.stats()["kv_bytes"] * 0.6 / 2**30) as engine:
        results = engine.generate(SHORT, **options)
        stats = engine.stats()
    assert_alone(whisper, SHORT, results, **options)
    assert stats["kv_bytes"] <= probe.stats()["kv_bytes"] * 0.6


def test_an_interrupt_ends_the_calls(whisper: Any) -> None:
    """In the thread that asks for the results, with code of the library's own running in another."""
    executor = ContinuousBatches(whisper, 16)
    given = [{}, {"logits_processor": [raising(KeyboardInterrupt())]}, {}]
    requests = [make(whisper, each, None, options, None, 16) for each, options in zip(SHORT, given, strict=False)]
    with pytest.raises(KeyboardInterrupt):
        for _ in turns(executor, requests):
            pass
    del executor
    gc.collect()
    assert not threads_left()


def test_without_fastgen(whisper: Any) -> None:
    fastgen.disable()
    with fastgen.Engine(whisper) as engine:
        assert_alone(whisper, SHORT, engine.generate(SHORT, num_beams=2), num_beams=2)


ASKS: dict[str, tuple[Callable[[fastgen.Engine], Any], set[type[Exception]]]] = {
    "generate": (lambda engine: engine.generate([SHORT[0]]), {RuntimeError}),
    "submit": (lambda engine: [engine.submit(each) for each in SHORT[:2]], {fastgen.EngineFull}),
    "close": (lambda engine: engine.close(), set()),
}


@pytest.mark.parametrize("kind", ASKS)
def test_code_of_the_user_does_not_wait_for_the_engine(whisper: Any, kind: str) -> None:
    """It runs in the thread of its call, for which that of the engine waits."""
    engine, told = fastgen.Engine(whisper, slots=8, max_waiting=1), set[type[Exception]]()
    ask, refused = ASKS[kind]

    def asks(progress: torch.Tensor) -> None:
        try:
            ask(engine)
        except Exception as error:
            told.add(type(error))

    (recording,), options = recordings(2 * WINDOW), {"return_timestamps": True, "max_new_tokens": 6}
    result = engine.submit(recording, monitor_progress=asks, **options).result(WAIT)
    assert_alone(whisper, [recording], [result], **options)
    assert told == refused
    engine.close()
    assert not threads_left()


def test_no_thread_can_be_started(whisper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with few of them: the request runs in that of the engine."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "fastgen-generate":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with fastgen.Engine(whisper, slots=8) as engine:
        results = engine.generate(SHORT)
    assert_alone(whisper, SHORT, results)


def test_numbers_may_be_tensors() -> None:
    """They are options, and no input of some rows."""
    make_model, inputs = MODELS["seamless, text"]
    model, one = build(make_model), {name: value[:1] for name, value in inputs().items()}
    options = {"tgt_lang": "eng", "max_new_tokens": torch.tensor(6)}
    with fastgen.Engine(model, slots=4) as engine:
        result = engine.submit(one, **options).result(WAIT)
    assert_alone(model, [one], [result], **options)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("encoded", [False, True])
def test_a_call_for_one_row_is_a_request(encoded: bool, rows: int) -> None:
    """Requests have one row each: what a model's own `generate` asks for several runs in its call."""
    model, ids = BY_NAME["bart"].build(), torch.randint(5, 90, (rows, 6))
    given = {"encoder_outputs": BaseModelOutput(model.get_encoder()(ids)[0])} if encoded else {"inputs": ids}
    made = make_inner(model, {**given, "max_new_tokens": 5}, 8)
    assert (made is not None) is (rows == 1)
