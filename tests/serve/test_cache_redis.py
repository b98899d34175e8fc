"""Responses that a Redis server keeps: a real one, which stops, hangs and is full."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastgen_serve.cache import CacheDown, RedisCache
from fastgen_serve.jobs import Encode, Generate
from tests.serve.caches import GREEDY, Model, asked, cached, settled
from tests.serve.servers import connected, until


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
        until(self._listens)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            connected(f"http://127.0.0.1:{self.port}").close()
            return True
        assert self.process.poll() is None
        return False

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


async def test_servers_share_what_redis_keeps(redis: Redis) -> None:
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


async def test_redis_stops_in_the_middle(redis: Redis, lookups: Any) -> None:
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
    found = lookups()
    # Of each of five responses that could not be looked up, it could not be kept either.
    assert found == {"hit": 2, "miss": 2, "down": 10}


async def test_redis_that_hangs_is_not_waited_for(redis: Redis) -> None:
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


async def test_the_pause_grows_while_redis_is_down(redis: Redis) -> None:
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


async def test_redis_that_is_full_is_asked_all_the_same(redis: Redis) -> None:
    cache = RedisCache(redis.url, 5.0)
    await cache.put({"a": b"1"})
    await cache._client.config_set("maxmemory", "1")
    with pytest.raises(CacheDown):
        await cache.put({"b": b"2"})
    assert await cache.get(["a", "b"]) == [b"1", None]
    await cache.close()
