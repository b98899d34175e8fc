"""Responses that are kept, by model, options and input (TurboTransformers keeps them, too: Fang et al., PPoPP 2021).

Only what is determined is kept: requests that draw tokens need a seed, and streams are never looked up. A cache that is
down costs nothing but its hits: it is asked again after a while. What is read from it is data, and is checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

import fastgen
from fastgen.pipeline.errors import SetupError, one_line
from fastgen.pipeline.loading import base_of, is_gguf
from fastgen_serve import log, metrics
from fastgen_serve.jobs import Encode, Generate, Generated, ModelInfo
from fastgen_serve.models import Models
from fastgen_serve.served import ServedModel
from fastgen_serve.settings import REDIS, ServeSettings, bytes_of

# Bytes of an entry in memory beside its key and its value.
_ENTRY = 200
# Seconds that Redis may take to answer; that it is not asked again after it has not, at first and at the most; and that
# it keeps values.
_PATIENCE = 0.05
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_KEPT = 86_400
_READ = 2**20
# Seconds between two looks at whether a model is ready.
_LOOKS = 0.5
_log = logging.getLogger("fastgen_serve")
T = TypeVar("T")
# What values are read as: anything else is none of ours, or damaged.
_GENERATED, _VECTOR = TypeAdapter(Generated), TypeAdapter(list[float])


class CacheDown(Exception):
    """The cache does not answer."""


class Cache(Protocol):
    """Keeps values by key for some time. Each method raises `CacheDown`."""

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of these keys, None for one that is not there."""

    async def put(self, values: Mapping[str, bytes]) -> None:
        """Keeps these values by their keys."""

    async def close(self) -> None:
        """Ends connections. Harmless to repeat."""


class MemoryCache:
    """Keeps values in memory, and drops those that nobody has asked for the longest.

    Args:
        most: bytes of all values and keys together.
    """

    def __init__(self, most: int) -> None:
        self._most, self._values, self.bytes = most, OrderedDict[str, bytes](), 0

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        for key in keys:
            if key in self._values:
                self._values.move_to_end(key)
        return [self._values.get(key) for key in keys]

    async def put(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self._drop(key)
            if _size(key, value) <= self._most:
                self._values[key] = value
                self.bytes += _size(key, value)
        while self.bytes > self._most:
            self._drop(next(iter(self._values)))

    async def close(self) -> None:
        """There is nothing to end."""

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        self.bytes -= 0 if value is None else _size(key, value)


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY


class RedisCache:
    """Keeps values in a Redis server for a day, which may be that of several servers.

    Args:
        url: redis://, rediss:// or unix://.
        patience: seconds that the server may take to answer.

    Raises:
        ValueError: it is no such address.
        ImportError: the package is not installed.
    """

    def __init__(self, url: str, patience: float = _PATIENCE, clock: Callable[[], float] = time.monotonic) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        # What is late is not wanted any more: nothing is tried twice.
        self._client = Redis.from_url(url, retry=Retry(NoBackoff(), 0))
        self._patience, self._clock = patience, clock
        self._pause = self._asks_from = 0.0

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return list(await self._answer(lambda: self._client.mget(keys)))

    async def put(self, values: Mapping[str, bytes]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, value in values.items():
            pipeline.set(key, value, ex=_KEPT)
        await self._answer(pipeline.execute)

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        from redis.exceptions import RedisError, ResponseError

        if self._clock() < self._asks_from:
            raise CacheDown("the cache was down some seconds ago")
        try:
            found = await asyncio.wait_for(ask(), self._patience)
        except ResponseError as error:  # it is there, and does not want this: its memory is full, for example
            raise CacheDown(str(error)) from error
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            self._pause = min(2 * self._pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._asks_from = self._clock() + self._pause
            raise CacheDown(str(error)) from error
        self._pause = 0.0
        return found


def make_cache(text: str) -> Cache:
    """The cache that an option names: "256MiB" in memory, or the address of a Redis server.

    Raises:
        ValueError: it is neither.
    """
    return RedisCache(text) if text.startswith(REDIS) else MemoryCache(bytes_of(text))


def keep_responses(models: Models, settings: ServeSettings) -> Models:
    """The same models, with the cache that the settings name.

    Raises:
        SetupError: there cannot be such a cache.
    """
    if settings.cache is None:
        return models
    try:
        cache = make_cache(settings.cache)
    except ImportError:
        raise SetupError("cache: the package redis is not installed, which fastgen's extra `serve` has") from None
    except ValueError:  # whose message may have a part of a password
        raise SetupError("cache: give a size, or the address of a Redis server, redis://HOST:PORT/0") from None
    kept = [CachedModel(model, cache, partial(identity_of, settings.path(model.name), settings)) for model in models]
    return Models(cast(list[ServedModel], kept))


# ---- which model


def identity_of(path: str, settings: ServeSettings) -> str:
    """What a model gives depends on: the digest of all its files, and of the settings that change its numbers.

    Args:
        path: its directory, its GGUF file, or a hub name whose files have been downloaded.

    Raises:
        OSError: one cannot be read.
    """
    found = hashlib.sha256(json.dumps([settings.dtype, settings.weight_dtype]).encode())
    for folder in map(_folder, dict.fromkeys((path, base_of(path)))):
        _add(found, folder)
    return found.hexdigest()


def _add(found: Any, folder: Path) -> None:
    """Adds a file, or all those of a folder, to a digest."""
    files = [folder] if folder.is_file() else sorted(each for each in folder.rglob("*") if each.is_file())
    for file in files:
        found.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode("utf-8", "surrogatepass"))
        with file.open("rb") as content:
            while part := content.read(_READ):
                found.update(part)


def _folder(path: str) -> Path:
    if Path(path).is_dir() or is_gguf(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


# ---- a model with a cache


class CachedModel:
    """A `ServedModel` whose responses are kept, as soon as it is known what they depend on.

    Args:
        model: is asked what is not known yet.
        identify: reads the files of the model, once it is ready, in a thread. Where it raises, nothing is kept. It is
            called again when a process of the model has died, as the next one reads files that may have changed.
    """

    def __init__(self, model: ServedModel, cache: Cache, identify: Callable[[], str]) -> None:
        self._model, self._cache, self._identify = model, cache, identify
        self._identity: str | None = None
        self._identified: ModelInfo | None = None  # what the process has said of itself whose files were read
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        """What is not here is the model's own."""
        return getattr(self._model, name)

    async def generate(self, job: Generate) -> Generated:
        """As the model's own, or what it returned for such a job before."""
        (made,) = await self.generate_all([job])
        return made

    async def generate_all(self, jobs: Sequence[Generate]) -> list[Generated]:
        """As the model's own, or what it returned for such jobs before."""
        keys = [self._key(job) if self._is_determined(job) else None for job in jobs]

        async def make(missing: Sequence[int]) -> list[Generated]:
            return await self._model.generate_all([jobs[number] for number in missing])

        return await self._filled(keys, _GENERATED, make)

    async def encode(self, jobs: Sequence[Encode]) -> list[list[float]]:
        """As the model's own; it is asked for those that are not known yet."""

        async def make(missing: Sequence[int]) -> list[list[float]]:
            return await self._model.encode([jobs[number] for number in missing])

        return await self._filled([self._key(job) for job in jobs], _VECTOR, make)

    async def start(self) -> None:
        """Has the model load."""
        await self._model.start()
        self._begin(self.identify())

    async def stop(self) -> None:
        """Ends the model, and the connections of the cache."""
        await self._model.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cache.close()

    async def identify(self) -> None:
        """Waits until the model is ready, and finds out what its responses depend on."""
        while not self._model.is_ready:
            await asyncio.sleep(_LOOKS)
        info = self._identified = self._model.info
        self._identity = None
        try:
            found = await asyncio.to_thread(self._identify)
        except Exception as error:
            _log.warning("%s: no response is kept, as its files cannot be read: %s", self.name, one_line(error))
            return
        if self._identified is info:
            self._identity = found

    def _key(self, job: Generate | Encode) -> str | None:
        """Under which the response is kept; None while it is not known what it depends on."""
        if self._identified is not None and self._identified is not self._model.info:  # it has a new process
            self._identified, self._identity = self._model.info, None
            self._begin(self.identify())
        if self._identity is None:
            return None
        form = json.dumps(getattr(job, "form", None))  # the order of fields in a schema is that of the result
        values = [fastgen.__version__, self.name, self._identity, type(job).__name__, asdict(job), form]
        return "fastgen:" + hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def _is_determined(self, job: Generate) -> bool:
        """Whether each run of a job gives the same, which is known by its tokens: images are not kept."""
        if job.inputs:
            return False
        draws = job.options.get("do_sample")
        return job.seed is not None or not (self._model.info.defaults.get("do_sample") if draws is None else draws)

    async def _filled(
        self,
        keys: Sequence[str | None],
        kind: TypeAdapter[T],
        make: Callable[[Sequence[int]], Awaitable[Sequence[T]]],
    ) -> list[T]:
        """What is kept under these keys, and what is made in place of the rest, which is kept then.

        Args:
            keys: of the responses; None for one that is not kept.
            kind: of the responses.
            make: the responses of these indices.
        """
        info, known = self._model.info, [key for key in keys if key is not None]
        kept = dict(zip(known, await self._look(known, kind), strict=True)) if known else {}
        found = [None if key is None else kept[key] for key in keys]
        missing = [number for number, each in enumerate(found) if each is None]
        made = dict(zip(missing, await make(missing), strict=True)) if missing else {}
        if self._model.info is info:  # otherwise a process has died, and the next one may have read other files
            new = {key: made[number] for number in missing if (key := keys[number]) is not None}
            if new:  # nobody waits until it is kept
                self._begin(self._put(new))
        return [made[number] if each is None else each for number, each in enumerate(found)]

    async def _look(self, keys: Sequence[str], kind: TypeAdapter[T]) -> list[Any]:
        """What is kept under these keys; None for what is not."""
        try:
            values = await self._cache.get(keys)
        except CacheDown:
            metrics.CACHE.labels("down").inc(len(keys))
            return [None] * len(keys)
        found = [_parsed(value, kind) for value in values]
        hits = sum(each is not None for each in found)
        metrics.CACHE.labels("hit").inc(hits)
        metrics.CACHE.labels("miss").inc(len(found) - hits)
        if hits:
            log.note(model=self.name, cached=hits)
        return found

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _put(self, values: Mapping[str, Any]) -> None:
        try:
            await self._cache.put({key: to_json(each, inf_nan_mode="constants") for key, each in values.items()})
        except CacheDown:
            metrics.CACHE.labels("down").inc(len(values))


def _parsed(value: bytes | None, kind: TypeAdapter[T]) -> T | None:
    """What a value says; None where it is none of ours, or damaged."""
    try:
        return None if value is None else kind.validate_json(value)
    except ValidationError:
        return None
