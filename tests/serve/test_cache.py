"""Which responses are kept, where, and what a cache that is down costs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastgen.pipeline.errors import SetupError
from fastgen_serve.app import create_app
from fastgen_serve.cache import CachedModel, MemoryCache, RedisCache, identity_of, keep_responses, make_cache
from fastgen_serve.jobs import Encode, Generate, Generated
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from tests.serve.caches import GREEDY, Model, asked, cached, in_memory, settled
from tests.serve.servers import BART, in_thread, until

# ---- what is kept


async def test_a_response_is_kept_as_it_is(lookups: Any) -> None:
    own, model = await in_memory()
    job = Generate((1, 2), GREEDY, logprobs=2)
    first, second = await asked(model, job), await asked(model, job)
    assert first == second and second is not first and len(own.generated) == 1
    assert lookups() == {"hit": 1, "miss": 1, "down": 0}


OTHERS = [
    Generate((1, 3), GREEDY),
    Generate((1, 2), {**GREEDY, "num_beams": 5}),
    Generate((1, 2), {**GREEDY, "max_new_tokens": 4}),
    Generate((1, 2), GREEDY, stop=("x",)),
    Generate((1, 2), GREEDY, logprobs=0),
    Generate((1, 2), GREEDY, form={"json_schema": {"properties": {"a": {}, "b": {}}}}),
    Generate((1, 2), GREEDY, form={"json_schema": {"properties": {"b": {}, "a": {}}}}),
]


@pytest.mark.parametrize("other", OTHERS)
async def test_another_request_has_another_response(other: Generate) -> None:
    own, model = await in_memory()
    await asked(model, Generate((1, 2), GREEDY))
    await asked(model, other)
    assert len(own.generated) == 2


async def test_another_model_has_other_responses() -> None:
    cache, own, renamed = MemoryCache(2**20), Model(), Model()
    renamed.name = "n"
    for model, digest in ((own, "d"), (own, "e"), (renamed, "d")):
        await asked(await cached(cache, model, digest), Generate((1, 2), GREEDY))
    assert len(own.generated) == 2 and len(renamed.generated) == 1


@pytest.mark.parametrize(
    ("options", "seed", "samples", "is_kept"),
    [
        ({}, None, False, True), ({}, None, True, False), ({"do_sample": None}, None, True, False),
        ({"do_sample": True}, None, False, False), ({"do_sample": True}, 7, False, True),
        ({"do_sample": False}, None, True, True), ({}, 7, True, True),
    ],
)  # fmt: skip
async def test_only_what_is_determined_is_kept(
    options: dict[str, Any], seed: int | None, samples: bool, is_kept: bool
) -> None:
    own, model = await in_memory(samples=samples)
    for _ in range(2):
        await asked(model, Generate((1, 2), options, seed=seed))
    assert len(own.generated) == (1 if is_kept else 2)


async def test_streams_are_the_models_own(lookups: Any) -> None:
    own, model = await in_memory()
    jobs = [Generate((1, 2), GREEDY, streams=True)]
    for _ in range(2):
        assert [each async for each in model.stream_all(jobs)] == [(0, Generated(()))]
    jobs *= 2
    assert [index async for index, _ in model.stream_all(jobs)] == [0, 1]
    assert len(own.generated) == 4
    assert not any(lookups().values())


async def test_vectors_that_are_not_known_are_made_together(lookups: Any) -> None:
    own, model = await in_memory()
    one, two, three = Encode((1,)), Encode((2,)), Encode((3,), token_type_ids=(0,))
    await model.encode([two])
    await settled(model)
    found = await model.encode([one, two, three])
    await settled(model)
    assert own.encoded == [two, one, three]
    assert found == [[0.1, -1e-30], [0.2, -1e-30], [0.1 * 3, -1e-30]]
    assert await model.encode([three, one, two]) == [found[2], found[0], found[1]]
    assert len(own.encoded) == 3
    assert lookups() == {"hit": 4, "miss": 3, "down": 0}


async def test_of_several_inputs_those_that_are_not_known_are_generated(lookups: Any) -> None:
    own, model = await in_memory()
    known, new, drawn = Generate((1,), GREEDY), Generate((2,), GREEDY), Generate((3,), {"do_sample": True})
    await asked(model, known)
    for _ in range(2):
        assert len(set(await model.generate_all([drawn, known, new]))) == 1
        await settled(model)
    assert own.generated == [known, drawn, new, drawn]
    assert lookups() == {"hit": 3, "miss": 2, "down": 0}


async def test_what_fails_is_not_kept() -> None:
    class Fails(Model):
        async def generate(self, job: Generate) -> Generated:
            await super().generate(job)
            raise RuntimeError("no")

    own, model = await in_memory(Fails())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await model.generate(Generate((1, 2), GREEDY))
    assert len(own.generated) == 2


async def test_the_rest_is_the_models_own() -> None:
    own, model = await in_memory()
    assert (model.name, model.info, model.tokenizer, model.is_ready) == ("m", own.info, "its tokenizer", True)
    await model.start()
    assert await model.stats() == {"waiting": 0}
    await model.stop()
    assert own.events == ["start", "stop"]


def test_nothing_is_kept_before_the_model_is_known(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        own, job = Model(), Generate((1, 2), GREEDY)
        own.is_ready = False
        model = CachedModel(own, MemoryCache(2**20), lambda: "d")
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
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        model = CachedModel(own, MemoryCache(2**20), lambda: identity_of("no-folder/at-all", ServeSettings()))
        await model.identify()
        for _ in range(2):
            await model.generate(Generate((1, 2), GREEDY))
        assert len(own.generated) == 2 and "no response is kept" in caplog.text

    asyncio.run(run())
    asyncio.run(fails())


async def test_the_files_are_read_again_for_each_process() -> None:
    own, job, digests = Model(), Generate((1, 2), GREEDY), iter("de")
    cache = MemoryCache(2**20)
    model = CachedModel(own, cache, lambda: next(digests))
    await model.identify()
    for _ in range(2):
        await asked(model, job)
    assert len(own.generated) == 1
    own.info = dataclasses.replace(own.info)  # as another process says it
    for _ in range(3):
        await asked(model, job)
    # While the files are read nothing is kept, and then there is nothing under the new name.
    assert len(own.generated) == 3 and next(digests, None) is None


async def test_a_response_of_a_process_that_began_meanwhile_is_not_kept() -> None:
    class Restarts(Model):
        async def generate(self, job: Generate) -> Generated:
            self.info = dataclasses.replace(self.info)
            return await super().generate(job)

    cache = MemoryCache(2**20)
    await asked(await cached(cache, Restarts()), Generate((1, 2), GREEDY))
    assert not cache.bytes


# ---- in memory


async def test_memory_is_bounded_and_what_is_old_goes_first() -> None:
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
    settings = ServeSettings()
    first = identity_of(str(model), settings)
    copied = Path(shutil.copytree(model, tmp_path / "copy"))
    assert identity_of(str(copied), settings) == first
    assert identity_of(str(model), ServeSettings(weight_dtype="int8")) != first
    (copied / "1_Pooling" / "config.json").write_text("{ }")
    assert identity_of(str(copied), settings) != first


# ---- what is damaged

JOB = Generate((1, 2), GREEDY)
DAMAGED = [b"", b"{", b"null", b"[]", b"3", b'{"sequences": 1}', b'{"sequences": [{"tokens": ["a"]}]}', b"\xff"]


@pytest.mark.parametrize("value", [*DAMAGED, json.dumps([[]] * 9).encode(), b"[" * 100_000])
async def test_a_value_that_is_none_of_ours_is_no_response(value: bytes) -> None:
    cache, own = MemoryCache(2**30), Model()
    model = await cached(cache, own)
    key = model._key(JOB)
    assert key is not None
    await cache.put({key: value})
    expected = await asked(model, JOB)
    assert len(own.generated) == 1
    assert await asked(model, JOB) == expected and len(own.generated) == 1  # it is replaced


# ---- in a server


def test_a_server_answers_from_its_cache(lookups: Any) -> None:
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
            return lookups()["hit"]

        first = ask()
        until(hits)  # its files have been read, and a response has been kept
        submitted = asyncio.run(model.stats())["submitted"]
        assert ask() == first
        assert asyncio.run(model.stats())["submitted"] == submitted
        ask(max_tokens=7)
        assert asyncio.run(model.stats())["submitted"] == submitted + 1
