"""Models that run jobs, here and in a process of their own: each answer is that of `generate` for its input alone."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from fastgen_serve.api.openai_decoding import decoding, make_job
from fastgen_serve.api.openai_schema import CompletionRequest
from fastgen_serve.errors import BadRequest, Busy, TimedOut, TooLong, Unavailable
from fastgen_serve.jobs import MOST_TOKENS, Delta, Encode, Generate, Generated, Sequence
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import engine, messages, process
from fastgen_serve.workers.local import LocalModel
from fastgen_serve.workers.remote import RemoteModel
from fastgen_serve.workers.worker import Worker
from tests.equivalence.check import in_threads
from tests.pipeline import tiny
from tests.serve.checkpoints import of_job
from tests.serve.servers import BART, GPT2, WAIT, happens

MODELS = (("bart", BART), ("gpt2", GPT2))
SETTINGS = ServeSettings(models=MODELS, slots=16, max_waiting=200, warm_up=False)
TEXTS = ("and the lord said", "fear not", "in the beginning god created", "go", "blessed are they that mourn for they")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"num_beams": 1},
    {},  # the model's own: 4 beams
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6},
    {"num_beams": 1, "min_new_tokens": 5, "repetition_penalty": 1.3},
    {"num_beams": 1, "do_sample": True, "top_k": 20},
    {"num_beams": 2, "no_repeat_ngram_size": 2, "early_stopping": False},
)


class Loop:
    """An event loop in a thread, which other threads give work."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()


@pytest.fixture(scope="module")
def loop(enabled: None) -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["bart", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def remote(loop: Loop, forks: None, name: str) -> Iterator[RemoteModel]:
    model = RemoteModel(name, SETTINGS)
    loop.run(model.start())
    loop.run(happens(lambda: model.is_ready))
    yield model
    loop.run(model.stop())


@pytest.fixture(scope="module")
def reference(name: str) -> Any:
    kind: Any = AutoModelForSeq2SeqLM if name == "bart" else AutoModelForCausalLM
    return kind.from_pretrained(dict(MODELS)[name], dtype=torch.float32).eval()


def check(model: Any, job: Generate, sequences: tuple[Sequence, ...]) -> None:
    wanted = of_job(model, job)
    assert [sequence.tokens for sequence in sequences] == [tokens for tokens, _ in wanted]
    for sequence, (_, score) in zip(sequences, wanted, strict=True):
        assert sequence.score == (None if score is None else pytest.approx(score, abs=1e-4))
        is_full = len(sequence.tokens) == job.options["max_new_tokens"]
        assert sequence.finish_reason == ("length" if is_full else "stop")
        assert sequence.generated == len(sequence.tokens) + (not is_full)


def test_answers_are_those_of_generate_for_each_input_alone(loop: Loop, remote: RemoteModel, reference: Any) -> None:
    draw = random.Random(1)
    jobs = []
    for number in range(20):
        tokens = tuple(remote.tokenizer(" ".join(draw.choices(TEXTS, k=draw.randint(1, 3)))).input_ids)
        options = {**draw.choice(OPTIONS), "max_new_tokens": draw.randint(1, 24)}
        if options["max_new_tokens"] < options.get("min_new_tokens", 0):
            del options["min_new_tokens"]
        jobs.append(Generate(tokens, options, seed=number, streams=bool(number % 2)))
    results: dict[int, Any] = {}

    async def answer(job: Generate) -> Generated:
        if not job.streams:
            return await remote.generate(job)
        *_, (_, last) = [each async for each in remote.stream_all([job])]
        assert isinstance(last, Generated)
        return last

    def client(first: int) -> None:
        for number in range(first, len(jobs), 8):
            results[number] = loop.run(answer(jobs[number]))

    in_threads(client, 8)
    for number, job in enumerate(jobs):
        check(reference, job, results[number].sequences)


def test_a_model_says_what_it_is(remote: RemoteModel, name: str) -> None:
    info = remote.info
    assert info.name == name and info.tasks == ("generate",) and info.slots == 16
    assert (info.kind, info.positions, info.max_new_tokens) == (
        ("encoder-decoder", 256, 200) if name == "bart" else ("decoder-only", 512, 64)
    )


@pytest.mark.parametrize(
    ("job", "said", "param"),
    [
        (Generate(()), "empty", "prompt"),
        (Generate((10**6,)), "from 0 to", "prompt"),
        (Generate((-1,)), "from 0 to", "prompt"),
        (Generate((5,), {"eos_token_id": [2, 10**6]}), "from 0 to", "eos_token_id"),
        (Generate((5,), {"bad_words_ids": [[10**6]]}), "from 0 to", "bad_words_ids"),
        (Generate((5,), {"no_such_option": 1}), "no option", "no_such_option"),
        (Generate((5,), {"custom_generate": "somebody/code"}), "no option", "custom_generate"),
        (Generate((5,), {"streamer": 1}), "no option", "streamer"),
        (Generate((5,), stop=("a", "")), "is empty", "stop"),
        (Generate((5,), {"temperature": -1.0, "do_sample": True, "num_beams": 1}), "positive", "temperature"),
        (Generate((5,) * 600), "positions", None),
        (Generate((5,), {"max_new_tokens": 5000}), "4096", "max_new_tokens"),
        (Generate((5,), {"num_beams": 17}), "16", "num_beams"),
    ],
    ids=str,
)
def test_what_generate_would_refuse_is_refused(
    loop: Loop, remote: RemoteModel, job: Generate, said: str, param: str | None
) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        loop.run(remote.generate(job))
    error = refused.value  # which has crossed a pipe
    assert (error.status, error.message) == (400, str(error)) and param in (None, error.param)


def test_a_model_that_generates_makes_no_vectors(loop: Loop, remote: RemoteModel) -> None:
    with pytest.raises(BadRequest, match="generate"):
        loop.run(remote.encode([Encode((5,))]))


def test_who_leaves_frees_the_slots(loop: Loop, remote: RemoteModel) -> None:
    async def leave() -> None:
        options = {"num_beams": 1, "max_new_tokens": 150, "min_new_tokens": 150}
        streams = [remote.stream_all([Generate((5, 6, 7 + i), options, streams=True)]) for i in range(4)]
        for stream in streams:
            assert isinstance((await anext(stream))[1], Delta)
        for stream in streams[:2]:
            await stream.aclose()
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams[2:]]
        waiting = [asyncio.ensure_future(remote.generate(Generate((5, 6), options))) for _ in range(3)]
        await asyncio.sleep(0)
        for task in (*tasks, *waiting):
            task.cancel()
        await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        for stream in streams[2:]:
            await stream.aclose()

    async def is_idle() -> None:
        while (stats := await remote.stats())["busy"] or stats["running"] or stats["waiting"]:
            await asyncio.sleep(0.02)

    loop.run(leave())
    loop.run(asyncio.wait_for(is_idle(), WAIT))
    assert not remote._pending and remote._admission.rows == 0


NARROW = ServeSettings(models=MODELS, slots=2, max_waiting=3, max_beams=2, warm_up=False)


def test_the_inputs_of_a_request_are_let_in_together(loop: Loop) -> None:
    jobs = [Generate((5, 6, 7 + number), {"num_beams": 2, "max_new_tokens": 8}, streams=True) for number in range(6)]

    async def streamed() -> dict[int, Any]:
        found = {index: event async for index, event in model.stream_all(jobs)}
        assert model._admission.rows == 0
        return found

    async def crowd() -> list[Any]:
        wholes = (model.generate_all(jobs), model.generate_all(jobs))
        return await asyncio.gather(*wholes, return_exceptions=True)

    with closing(LocalModel("gpt2", NARROW)) as model:
        first, second = loop.run(crowd())
        assert len(first) == len(jobs) and isinstance(second, Busy)
        last = loop.run(streamed())
        for index, made in enumerate(first):
            assert [each.tokens for each in last[index].sequences] == [each.tokens for each in made.sequences]
        with pytest.raises(BadRequest):  # one that fails ends the others
            loop.run(model.generate_all([Generate((5, 6), {"max_new_tokens": 100, "num_beams": 1}), Generate((-1,))]))
        assert model._admission.rows == 0


def test_a_model_without_positions_has_a_limit(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(True)
    sizes = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=1, pad_token_id=1)
    T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with closing(LocalModel("t5", ServeSettings(models=(("t5", str(tmp_path)),), slots=2, warm_up=False))) as model:
        assert model.info.positions == MOST_TOKENS


def test_a_model_whose_files_ask_for_several_results_gives_one(loop: Loop, tmp_path: Path) -> None:
    path = Path(shutil.copytree(GPT2, tmp_path / "several"))
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "num_beams": 2, "num_return_sequences": 2}))
    settings = ServeSettings(models=(("several", str(path)),), slots=2)  # it warms up, too
    with closing(LocalModel("several", settings)) as model:
        for fields in ({}, {"temperature": 0}, {"temperature": 1}):
            body = CompletionRequest.model_validate({"prompt": "a", **fields})
            job = make_job(decoding(body, model.info), body, (5, 6), 3)
            assert len(loop.run(model.generate(job)).sequences) == 1


def test_more_than_may_wait_are_refused_and_the_others_served(loop: Loop) -> None:
    async def crowd() -> list[Any]:
        jobs = [Generate((5, 6, 7), {"num_beams": 1, "max_new_tokens": 10})] * 12
        return await asyncio.gather(*map(model.generate, jobs), return_exceptions=True)

    with closing(LocalModel("bart", NARROW)) as model:
        results = loop.run(crowd())
        assert sum(isinstance(result, Busy) for result in results) == 7
        assert sum(isinstance(result, Generated) for result in results) == 5
        assert all(result.retry_after >= 1 for result in results if isinstance(result, Busy))
        assert model._admission.rows == 0
    with pytest.raises(Unavailable):
        loop.run(model.generate(Generate((5,), {"num_beams": 1})))


def test_a_request_takes_no_longer_than_it_may(loop: Loop) -> None:
    settings, job = (
        ServeSettings(models=MODELS, warm_up=False, request_timeout_s=0.05),
        Generate((5, 6, 7), {"max_new_tokens": 200}),
    )
    with closing(LocalModel("bart", settings)) as model, pytest.raises(TimedOut, match=r"0\.05 s"):
        loop.run(model.generate(job))


@pytest.mark.parametrize("gib", [None, 1e-4])
def test_k_and_v_have_a_limit(loop: Loop, gib: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the user's, it is a part of what is free."""
    monkeypatch.setattr(engine, "free_host_memory", lambda: 100_000)
    monkeypatch.setattr(engine, "LEAST_CACHE", 100_000)
    with closing(LocalModel("bart", ServeSettings(models=MODELS, warm_up=False, cache_gib=gib))) as model:
        assert isinstance(loop.run(model.generate(Generate((5,), {"num_beams": 1, "max_new_tokens": 1}))), Generated)
        with pytest.raises(TooLong, match="--cache-gib") as refused:
            loop.run(model.generate(Generate((5, 6, 7), {"max_new_tokens": 200})))
        assert refused.value.param == "max_tokens"


def test_models_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "free_host_memory", lambda: 8 * 2**30)
    assert [engine.cache_share(models) for models in (1, 4)] == [2.0, 0.5]


@pytest.mark.parametrize("cores, limit, threads", [(64, 4, 4), (2, 4, None), (4, 4, None), (64, None, None)])
def test_a_model_has_no_more_threads_than_its_container_has_processors(
    cores: int, limit: int | None, threads: int | None
) -> None:
    assert process.fewer_threads(cores, limit) == threads


def test_a_worker_is_quiet_once_no_job_comes_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, running, numbers = Worker("bart", SETTINGS, lambda message: None), list[Callable[[Any], object]](), count()
    runner = SimpleNamespace(submit=lambda job, on_done, on_error: running.append(on_done))
    monkeypatch.setattr(worker, "_runner", runner)

    def come() -> None:
        worker.receive(messages.Submit(next(numbers), Generate((5,))))

    def go() -> None:
        running.pop()(Generated(()))

    # What happens in each wait, the first of which is for a job.
    each_wait: list[list[Callable[[], None]]] = [[come], [], [come, go], [], [go, come, go], [], [come]]

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            for happen in each_wait.pop(0):
                happen()
            return self.is_set()

    monkeypatch.setattr(worker, "_has_come", Event())
    worker.wait_until_quiet(1.0)
    assert each_wait == [[come]]


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 1, "max_new_tokens": None}])
def test_a_result_whose_last_token_is_forced_for_want_of_room_is_cut_off(
    loop: Loop, tmp_path: Path, options: dict[str, Any]
) -> None:
    """BART's files have EOS forced as the last token: it does not say that the model was done."""
    options = {"max_new_tokens": 4, **options}
    settings = ServeSettings(models=(("bart", str(tiny.bart(tmp_path))),), slots=4, warm_up=False)
    with closing(LocalModel("bart", settings)) as model:
        (cut,) = loop.run(model.generate(Generate((0, 5, 6, 2), options))).sequences
        wanted = {**options, "forced_eos_token_id": None}
        (whole,) = loop.run(model.generate(Generate((0, 5, 6, 2), wanted))).sequences
        # A token that ends a result, and is not the last one that there is room for.
        job = Generate((0, 5, 6, 2), {**options, "num_beams": 1, "eos_token_id": [2, cut.tokens[0]]})
        (early,) = loop.run(model.generate(job)).sequences
    assert (cut.finish_reason, cut.generated) == ("length", len(cut.tokens) + 1)
    assert whole.finish_reason == "length" and len(whole.tokens) == cut.generated
    assert early.finish_reason == "stop"
