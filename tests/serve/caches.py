"""What tests of the cache share: a model that counts what it is asked for."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastgen_serve.cache import Cache, CachedModel, MemoryCache
from fastgen_serve.jobs import Encode, Generate, Generated, ModelInfo, TokenLogprob
from fastgen_serve.jobs import Sequence as Written

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

    async def generate_all(self, jobs: Sequence[Generate]) -> list[Generated]:
        return [await self.generate(job) for job in jobs]

    async def stream_all(self, jobs: Sequence[Generate]) -> AsyncGenerator[tuple[int, Any], None]:
        for index, job in enumerate(jobs):
            self.generated.append(job)
            yield index, Generated(())

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
    model.info = dataclasses.replace(model.info, defaults={"do_sample": True} if samples else {})
    found = CachedModel(model, cache, lambda: digest)
    await found.identify()
    return found


async def in_memory(own: Model | None = None, samples: bool = False) -> tuple[Model, CachedModel]:
    """A model, and the same with a cache in memory."""
    own = own or Model()
    return own, await cached(MemoryCache(2**20), own, samples=samples)


async def settled(model: CachedModel) -> None:
    """What is to be kept is."""
    await asyncio.gather(*model._tasks)


async def asked(model: CachedModel, job: Generate) -> Generated:
    found = await model.generate(job)
    await settled(model)
    return found
