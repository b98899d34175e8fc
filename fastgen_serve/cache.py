"""Caches responses by model, options and input, as TurboTransformers does (Fang et al., PPoPP 2021).

Only deterministic responses are cached: requests that sample need a seed, and streams are never looked up. If the cache
is down, requests only lose its hits, and the server asks it again after a while. Cached values are parsed as data, and
validated.
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

# Bytes that an entry takes in memory besides its key and its value.
_ENTRY = 200
# In seconds: how long Redis may take to answer; the first and the longest pause after it has not answered; and how long
# it keeps a value.
_PATIENCE = 0.05
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_KEPT = 86_400
_READ = 2**20
# Seconds between two polls of whether a model is ready.
_LOOKS = 0.5
_log = logging.getLogger("fastgen_serve")
T = TypeVar("T")
# The types of cached values: anything else is foreign, or damaged.
_GENERATED, _VECTOR = TypeAdapter(Generated), TypeAdapter(list[float])


class CacheDown(Exception):
    """The cache does not answer."""


class Cache(Protocol):
    """Stores values by key for some time. `get` and `put` may raise `CacheDown`."""

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values of these keys; None for a missing one."""

    async def put(self, values: Mapping[str, bytes]) -> None:
        """Stores these values by their keys."""

    async def close(self) -> None:
        """Closes connections. Harmless to repeat."""


class MemoryCache:
    """Keeps values in memory, and evicts the least recently used.

    Args:
        most: the limit in bytes of all values and keys together.
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
        """Does nothing: there are no connections."""

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        self.bytes -= 0 if value is None else _size(key, value)


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY


class RedisCache:
    """Keeps values for a day in a Redis server, which several servers may share.

    Args:
        url: redis://, rediss:// or unix://.
        patience: seconds that the server may take to answer.

    Raises:
        ValueError: the address is invalid.
        ImportError: the package is not installed.
    """

    def __init__(self, url: str, patience: float = _PATIENCE, clock: Callable[[], float] = time.monotonic) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        # No retries: a late value is of no use.
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
        except ResponseError as error:  # Redis answers but refuses: its memory is full, for example
            raise CacheDown(str(error)) from error
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            self._pause = min(2 * self._pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._asks_from = self._clock() + self._pause
            raise CacheDown(str(error)) from error
        self._pause = 0.0
        return found


def make_cache(text: str) -> Cache:
    """Creates the cache that an option names: "256MiB" in memory, or the address of a Redis server.

    Raises:
        ValueError: it is neither.
    """
    return RedisCache(text) if text.startswith(REDIS) else MemoryCache(bytes_of(text))


def keep_responses(models: Models, settings: ServeSettings) -> Models:
    """Returns the models, wrapped with the cache that the settings name, if they name one.

    Raises:
        SetupError: the cache cannot be created.
    """
    if settings.cache is None:
        return models
    try:
        cache = make_cache(settings.cache)
    except ImportError:
        raise SetupError("cache: the package redis is not installed, which fastgen's extra `serve` has") from None
    except ValueError:  # not quoted: the message may contain a part of a password
        raise SetupError("cache: give a size, or the address of a Redis server, redis://HOST:PORT/0") from None
    kept = [CachedModel(model, cache, partial(identity_of, settings.path(model.name), settings)) for model in models]
    return Models(cast(list[ServedModel], kept))


# ---- the model's identity


def identity_of(path: str, settings: ServeSettings) -> str:
    """Returns a digest of all that a model's responses depend on: its files, and the settings that change its numerics.

    Args:
        path: its directory, its GGUF file, or a hub name whose files have been downloaded.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256(json.dumps([settings.dtype, settings.weight_dtype]).encode())
    for folder in map(_folder, dict.fromkeys((path, base_of(path)))):
        _add(found, folder)
    return found.hexdigest()


def _add(found: Any, folder: Path) -> None:
    """Adds a file, or all files of a folder, to a digest."""
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


# ---- the model with a cache


class CachedModel:
    """A `ServedModel` that caches responses, once the digest of what they depend on is known.

    Args:
        model: serves the requests that are not cached.
        identify: reads the model's files in a thread, once the model is ready. If it raises, nothing is cached. It is
            called again after a process of the model has died, because the next process may have read changed files.
    """

    def __init__(self, model: ServedModel, cache: Cache, identify: Callable[[], str]) -> None:
        self._model, self._cache, self._identify = model, cache, identify
        self._identity: str | None = None
        self._identified: ModelInfo | None = None  # the info of the process whose files were read
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        """Returns any other attribute of the model."""
        return getattr(self._model, name)

    async def generate(self, job: Generate) -> Generated:
        """Returns the model's result, or the cached result of an equal job."""
        (made,) = await self.generate_all([job])
        return made

    async def generate_all(self, jobs: Sequence[Generate]) -> list[Generated]:
        """Returns the model's results, or the cached results of equal jobs."""
        keys = [self._key(job) if self._is_determined(job) else None for job in jobs]

        async def make(missing: Sequence[int]) -> list[Generated]:
            return await self._model.generate_all([jobs[number] for number in missing])

        return await self._filled(keys, _GENERATED, make)

    async def encode(self, jobs: Sequence[Encode]) -> list[list[float]]:
        """Returns the model's results; it runs only the jobs that are not cached."""

        async def make(missing: Sequence[int]) -> list[list[float]]:
            return await self._model.encode([jobs[number] for number in missing])

        return await self._filled([self._key(job) for job in jobs], _VECTOR, make)

    async def start(self) -> None:
        """Starts loading the model."""
        await self._model.start()
        self._begin(self.identify())

    async def stop(self) -> None:
        """Stops the model, and closes the connections of the cache."""
        await self._model.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cache.close()

    async def identify(self) -> None:
        """Waits until the model is ready, and computes the digest of what its responses depend on."""
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
        """Returns the key of a job's response; None while the model's identity is unknown."""
        if self._identified is not None and self._identified is not self._model.info:  # the model has a new process
            self._identified, self._identity = self._model.info, None
            self._begin(self.identify())
        if self._identity is None:
            return None
        form = json.dumps(getattr(job, "form", None))  # results have their fields in the schema's order
        values = [fastgen.__version__, self.name, self._identity, type(job).__name__, asdict(job), form]
        return "fastgen:" + hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def _is_determined(self, job: Generate) -> bool:
        """Returns whether a job's tokens and options determine its result: jobs with images are not cached."""
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
        """Returns the cached responses; computes the missing ones, and then caches them.

        Args:
            keys: the key of each response; None for one that is not cached.
            kind: the type of the responses.
            make: computes the responses of these indices.
        """
        info, known = self._model.info, [key for key in keys if key is not None]
        kept = dict(zip(known, await self._look(known, kind), strict=True)) if known else {}
        found = [None if key is None else kept[key] for key in keys]
        missing = [number for number, each in enumerate(found) if each is None]
        made = dict(zip(missing, await make(missing), strict=True)) if missing else {}
        if self._model.info is info:  # otherwise a process has died, and the next one may have read other files
            new = {key: made[number] for number in missing if (key := keys[number]) is not None}
            if new:  # nobody waits for the write
                self._begin(self._put(new))
        return [made[number] if each is None else each for number, each in enumerate(found)]

    async def _look(self, keys: Sequence[str], kind: TypeAdapter[T]) -> list[Any]:
        """Returns the cached values of these keys; None for a missing one."""
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
    """Parses a cached value; returns None if it is foreign, or damaged."""
    try:
        return None if value is None else kind.validate_json(value)
    except ValidationError:
        return None
