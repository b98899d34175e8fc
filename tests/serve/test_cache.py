"""Which responses are kept, where, and what a cache that is down costs."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastgen.pipeline.errors import SetupError
from fastgen_serve import metrics
from fastgen_serve.app import create_app
from fastgen_serve.cache import (
    Cache,
    CachedModel,
    CacheDown,
    Identity,
    MemoryCache,
    RedisCache,
    identity_of,
    keep_responses,
    make_cache,
)
from fastgen_serve.jobs import Encode, Generate, Generated, ModelInfo, TokenLogprob
from fastgen_serve.jobs import Sequence as Written
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from tests.serve.servers import BART, in_thread, until

GREEDY = {"do_sample": False, "num_beams": 4}


class Model:
    """Counts what it is asked for."""

    name, tokenizer, is_ready = "m", "its tokenizer", True
    info = ModelInfo("m", "decoder-only", ("generate",), 64)

    def __init__(self) -> None:
        self.generated, self.encoded, self.events = list[Generate](), list[Encode](), list[str]()

    async def generate(self, job: Generate) -> Generated:
        self.generated.append(job)
        logprobs = (TokenLogprob(3, -0.1, ((3, -0.1), (4, float("-inf")))),)
        return Generated((Written((3, 4), "stop", -0.25, None, 3), Written((3,), "length", None, logprobs, 1)))

    async def stream(self, job: Generate) -> AsyncIterator[Any]:
        self.generated.append(job)
        yield Generated(())

    async def encode(self, jobs: Sequence[Encode]) -> list[list[float]]:
        self.encoded.extend(jobs)
        return [[0.1 * sum(job.tokens), -1e-30] for job in jobs]

    async def stats(self) -> dict[str, Any]:
        return {"waiting": 0}

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")


async def cached(cache: Cache, model: Model, digest: str = "d", samples: bool = False) -> CachedModel:
    found = CachedModel(model, cache, lambda: Identity(digest, samples))
    await found.identify()
    return found


async def settled(model: CachedModel) -> None:
    """What is to be kept is."""
    await asyncio.gather(*model._tasks)


async def asked(model: CachedModel, job: Generate) -> Generated:
    found = await model.generate(job)
    await settled(model)
    return found


def counts() -> dict[str, float]:
    names = ("hit", "miss", "down")
    return {name: metrics.REGISTRY.get_sample_value("fastgen_cache_total", {"outcome": name}) or 0 for name in names}


@pytest.fixture
def counted() -> Callable[[], dict[str, float]]:
    """What was counted since the beginning of the test."""
    before = counts()
    return lambda: {name: value - before[name] for name, value in counts().items()}


# ---- what is kept


def test_a_response_is_kept_as_it_is(counted: Callable[[], dict[str, float]]) -> None:
    async def run() -> None:
        own = Model()
        model = await cached(MemoryCache(2**20), own)
        job = Generate((1, 2), GREEDY, logprobs=2)
        first, second = await asked(model, job), await asked(model, job)
        assert first == second and second is not first and len(own.generated) == 1

    asyncio.run(run())
    assert counted() == {"hit": 1, "miss": 1, "down": 0}


OTHERS = [
    Generate((1, 3), GREEDY),
    Generate((1, 2), {**GREEDY, "num_beams": 5}),
    Generate((1, 2), {**GREEDY, "max_new_tokens": 4}),
    Generate((1, 2), GREEDY, stop=("x",)),
    Generate((1, 2), GREEDY, logprobs=0),
]


@pytest.mark.parametrize("other", OTHERS)
def test_another_request_has_another_response(other: Generate) -> None:
    async def run() -> None:
        own = Model()
        model = await cached(MemoryCache(2**20), own)
        await asked(model, Generate((1, 2), GREEDY))
        await asked(model, other)
        assert len(own.generated) == 2

    asyncio.run(run())


def test_another_model_has_other_responses() -> None:
    async def run() -> None:
        cache, own = MemoryCache(2**20), Model()
        renamed = Model()
        renamed.name = "n"
        job = Generate((1, 2), GREEDY)
        for model in (await cached(cache, own), await cached(cache, own, digest="e"), await cached(cache, renamed)):
            await asked(model, job)
        assert len(own.generated) == 2 and len(renamed.generated) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "seed", "samples", "is_kept"),
    [
        ({}, None, False, True),
        ({}, None, True, False),
        ({"do_sample": None}, None, True, False),
        ({"do_sample": True}, None, False, False),
        ({"do_sample": True}, 7, False, True),
        ({"do_sample": False}, None, True, True),
        ({}, 7, True, True),
    ],
)
def test_only_what_is_determined_is_kept(
    options: dict[str, Any], seed: int | None, samples: bool, is_kept: bool
) -> None:
    async def run() -> None:
        own = Model()
        model = await cached(MemoryCache(2**20), own, samples=samples)
        for _ in range(2):
            await asked(model, Generate((1, 2), options, seed=seed))
        assert len(own.generated) == (1 if is_kept else 2)

    asyncio.run(run())


def test_streams_are_the_models_own(counted: Callable[[], dict[str, float]]) -> None:
    async def run() -> None:
        own = Model()
        model = await cached(MemoryCache(2**20), own)
        for _ in range(2):
            assert [each async for each in model.stream(Generate((1, 2), GREEDY, streams=True))] == [Generated(())]
        assert len(own.generated) == 2

    asyncio.run(run())
    assert not any(counted().values())


def test_vectors_that_are_not_known_are_made_together(counted: Callable[[], dict[str, float]]) -> None:
    async def run() -> None:
        own = Model()
        model = await cached(MemoryCache(2**20), own)
        one, two, three = Encode((1,)), Encode((2,)), Encode((3,), normalize=True)
        await model.encode([two])
        await settled(model)
        found = await model.encode([one, two, three])
        await settled(model)
        assert own.encoded == [two, one, three]
        assert found == [[0.1, -1e-30], [0.2, -1e-30], [0.1 * 3, -1e-30]]
        assert await model.encode([three, one, two]) == [found[2], found[0], found[1]]
        assert len(own.encoded) == 3

    asyncio.run(run())
    assert counted() == {"hit": 4, "miss": 3, "down": 0}


def test_what_fails_is_not_kept() -> None:
    class Fails(Model):
        async def generate(self, job: Generate) -> Generated:
            await super().generate(job)
            raise RuntimeError("no")

    async def run() -> None:
        own = Fails()
        model = await cached(MemoryCache(2**20), own)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await model.generate(Generate((1, 2), GREEDY))
        assert len(own.generated) == 2

    asyncio.run(run())


def test_the_rest_is_the_models_own() -> None:
    async def run() -> None:
        own = Model()
        model = await cached(MemoryCache(2**20), own)
        assert (model.name, model.info, model.tokenizer, model.is_ready) == ("m", own.info, "its tokenizer", True)
        await model.start()
        assert await model.stats() == {"waiting": 0}
        await model.stop()
        assert own.events == ["start", "stop"]

    asyncio.run(run())


def test_nothing_is_kept_before_the_model_is_known(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        own, job = Model(), Generate((1, 2), GREEDY)
        own.is_ready = False
        model = CachedModel(own, MemoryCache(2**20), lambda: Identity("d", False))
        await model.start()
        for _ in range(2):
            await model.generate(job)
            await model.encode([Encode((1,))])
        assert len(own.generated) == len(own.encoded) == 2
        own.is_ready = True
        await settled(model)
        for _ in range(2):
            await asked(model, job)
        assert len(own.generated) == 3
        await model.stop()

    async def fails() -> None:
        own = Model()
        model = CachedModel(own, MemoryCache(2**20), lambda: identity_of("no-folder/at-all", ServeSettings()))
        await model.identify()
        for _ in range(2):
            await model.generate(Generate((1, 2), GREEDY))
        assert len(own.generated) == 2 and "no response is kept" in caplog.text

    asyncio.run(run())
    asyncio.run(fails())


# ---- in memory


def test_memory_is_bounded_and_what_is_old_goes_first() -> None:
    async def run() -> None:
        cache = MemoryCache(1000)
        for key in "abc":
            await cache.put({key: b"x" * 100})
        assert cache.bytes == 3 * 301
        assert await cache.get(["a"]) == [b"x" * 100]  # which is used now
        await cache.put({"d": b"y" * 100})
        assert [value is not None for value in await cache.get(list("abcd"))] == [True, False, True, True]
        await cache.put({"d": b"z"})
        assert cache.bytes == 2 * 301 + 202 and await cache.get(["d"]) == [b"z"]
        await cache.put({"e": b"x" * 1000})  # which has no room at all
        assert cache.bytes == 2 * 301 + 202 and await cache.get(["e"]) == [None]

    asyncio.run(run())


def test_the_cache_of_an_option() -> None:
    for text, most in (("256MiB", 2**28), ("1.5GB", 1_500_000_000), ("100 B", 100)):
        found = make_cache(text)
        assert isinstance(found, MemoryCache) and found._most == most
    assert isinstance(make_cache("redis://:secret@localhost:6379/1"), RedisCache)
    for text in ("", "256", "MiB", "-1MiB", "256Mib", "http://:secret@localhost"):
        with pytest.raises(ValueError, match="cache: give a size") as error:
            make_cache(text)
        assert "secret" not in str(error.value)


def test_the_models_of_a_server_have_its_cache() -> None:
    models = Models([Model()])
    assert keep_responses(models, ServeSettings()) is models
    found = keep_responses(models, ServeSettings(models=(("m", "folder"),), cache="1MiB"))
    assert isinstance(found.get("m"), CachedModel) and found.names() == ["m"]
    for address in ("redis://localhost:secret", "redis://:secret@localhost:port/0"):
        with pytest.raises(SetupError, match="cache: give a size, or the address") as error:
            keep_responses(models, ServeSettings(models=(("m", "folder"),), cache=address))
        assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="cache: give a size"):
        ServeSettings(cache="much")


# ---- which model


def test_the_identity_of_a_model_is_the_content_of_its_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "1_Pooling").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "generation_config.json").write_text('{"do_sample": true}')
    settings = ServeSettings()
    first = identity_of(str(model), settings)
    assert first.samples
    copied = Path(shutil.copytree(model, tmp_path / "copy"))
    assert identity_of(str(copied), settings) == first
    assert identity_of(str(model), ServeSettings(weight_dtype="int8")).digest != first.digest
    (copied / "1_Pooling" / "config.json").write_text("{ }")
    assert identity_of(str(copied), settings).digest != first.digest
    (copied / "generation_config.json").unlink()
    assert not identity_of(str(copied), settings).samples


# ---- in Redis


class Redis:
    """A Redis server of this test's own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", self.port, "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        self.process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server, which a package of the system has")
    pytest.importorskip("redis")
    server = Redis(tmp_path)
    yield server
    server.stop()


JOB = Generate((1, 2), GREEDY)


def test_servers_share_what_redis_keeps(redis: Redis) -> None:
    async def run() -> None:
        one, two = Model(), Model()
        first, second = [await cached(RedisCache(redis.url, 5.0), own) for own in (one, two)]
        assert await asked(first, JOB) == await asked(second, JOB)
        assert (len(one.generated), len(two.generated)) == (1, 0)
        await first.encode([Encode((1,)), Encode((2,))])
        await settled(first)
        assert await second.encode([Encode((2,)), Encode((3,))]) == [[0.2, -1e-30], [0.1 * 3, -1e-30]]
        assert two.encoded == [Encode((3,))]
        await first.stop()
        await second.stop()

    asyncio.run(run())


def test_redis_stops_in_the_middle(redis: Redis, counted: Callable[[], dict[str, float]]) -> None:
    async def run() -> None:
        now, own = [0.0], Model()
        cache = RedisCache(redis.url, 5.0, lambda: now[0])
        model = await cached(cache, own)
        expected = await asked(model, JOB)
        assert await asked(model, JOB) == expected and len(own.generated) == 1
        redis.stop()
        for number in range(4):
            assert await asked(model, JOB) == expected and len(own.generated) == 2 + number
        redis.start()
        assert await asked(model, JOB) == expected  # it is not asked again yet
        assert len(own.generated) == 6
        now[0] += 60
        await asked(model, JOB)  # and has forgotten
        await asked(model, JOB)
        assert len(own.generated) == 7
        await model.stop()

    asyncio.run(run())
    found = counted()
    # Of each of five responses that could not be looked up, it could not be kept either.
    assert found == {"hit": 2, "miss": 2, "down": 10}


def test_redis_that_hangs_is_not_waited_for(redis: Redis) -> None:
    async def run() -> None:
        cache = RedisCache(redis.url, 0.3)
        await cache.put({"a": b"1"})
        redis.process.send_signal(signal.SIGSTOP)
        with pytest.raises(CacheDown):
            await cache.get(["a"])
        with pytest.raises(CacheDown, match="some seconds ago"):
            await cache.get(["a"])
        redis.process.send_signal(signal.SIGCONT)
        cache._asks_from = 0.0
        assert await cache.get(["b", "a"]) == [None, b"1"]  # not the answer to an earlier question
        await cache.close()

    asyncio.run(run())


def test_the_pause_grows_while_redis_is_down(redis: Redis) -> None:
    async def run() -> None:
        now = [0.0]
        cache = RedisCache(redis.url, 5.0, lambda: now[0])
        redis.stop()
        pauses = []
        for _ in range(9):
            with pytest.raises(CacheDown):
                await cache.get(["a"])
            pauses.append(cache._asks_from - now[0])
            now[0] = cache._asks_from
        assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-1] == 30.0

    asyncio.run(run())


def test_redis_that_is_full_is_asked_all_the_same(redis: Redis) -> None:
    async def run() -> None:
        cache = RedisCache(redis.url, 5.0)
        await cache.put({"a": b"1"})
        await cache._client.config_set("maxmemory", "1")
        with pytest.raises(CacheDown):
            await cache.put({"b": b"2"})
        assert await cache.get(["a", "b"]) == [b"1", None]
        await cache.close()

    asyncio.run(run())


DAMAGED = [b"", b"{", b"null", b"[]", b"3", b'{"sequences": 1}', b'{"sequences": [{"tokens": ["a"]}]}', b"\xff"]


@pytest.mark.parametrize("value", [*DAMAGED, json.dumps([[]] * 9).encode(), b"[" * 100_000])
def test_a_value_that_is_none_of_ours_is_no_response(value: bytes) -> None:
    async def run() -> None:
        cache, own = MemoryCache(2**30), Model()
        model = await cached(cache, own)
        await cache.put({model._key(JOB, Identity("d", False)): value})
        expected = await asked(model, JOB)
        assert len(own.generated) == 1
        assert await asked(model, JOB) == expected and len(own.generated) == 1  # it is replaced

    asyncio.run(run())


# ---- in a server


def test_a_server_answers_from_its_cache(counted: Callable[[], dict[str, float]]) -> None:
    settings = ServeSettings(models=(("bart", BART),), cache="1MiB", warm_up=False, slots=4)
    model = LocalModel("bart", settings)
    request = {"model": "bart", "prompt": "fear not for i am with thee", "num_beams": 2, "max_tokens": 8}
    with in_thread(create_app(settings, Models([model]))) as url:

        def ask(**more: Any) -> Any:
            response = httpx.post(f"{url}/v1/completions", json={**request, **more}, timeout=60)
            assert response.status_code == 200, response.text
            return response.json()["choices"]

        def hits() -> float:
            ask()
            return counted()["hit"]

        first = ask()
        until(hits)  # its files have been read, and a response has been kept
        submitted = asyncio.run(model.stats())["submitted"]
        assert ask() == first
        assert asyncio.run(model.stats())["submitted"] == submitted
        ask(max_tokens=7)
        assert asyncio.run(model.stats())["submitted"] == submitted + 1
