"""The client: sends requests to a server and records when answers arrive. It is a process of its own, `python -m
benchmarks.serving.load`, which reads a `Load` as JSON from standard input and writes the answers to standard output.

Open loop: requests arrive in a Poisson process, independently of answers; one that the client sends late counts from
when it was due. Closed loop: a number of clients, each of which waits for its answer before its next request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks import processes

# Seconds to wait for answers after the last request.
_PATIENCE = 60.0


@dataclass
class Load:
    """The requests to send.

    Attributes:
        url: of the path of all requests.
        bodies: of the requests, in order, repeated from the start.
        seconds: during which requests are sent.
        rate: requests per second, on average, in an open loop.
        clients: number of them, in a closed loop.
        streams: whether answers are server-sent events.
        seed: of the arrival times.
    """

    url: str
    bodies: Sequence[Any]
    seconds: float
    rate: float | None = None
    clients: int = 1
    streams: bool = False
    seed: int = 0


@dataclass
class Answer:
    """The outcome of a request.

    Attributes:
        body: its index.
        due: seconds from the start until it was due.
        first: seconds until the first text of a stream; None for none.
        end: seconds until the complete answer; None if it did not arrive in time.
        status: of HTTP; 0 if the connection failed.
        retry_after: the header.
        content: the JSON of the answer, or the text of a stream.
    """

    body: int
    due: float
    first: float | None = None
    end: float | None = None
    status: int = 0
    retry_after: str | None = None
    content: Any = None

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.end is not None

    @property
    def latency(self) -> float:
        """Seconds since it was due."""
        return float("inf") if self.end is None else self.end - self.due


def run(load: Load) -> list[Answer]:
    """Sends a load from a process of its own. Raises RuntimeError if that fails."""
    command = [sys.executable, "-m", "benchmarks.serving.load"]
    done = processes.run(command, threads=1, asked=json.dumps(dataclasses.asdict(load)))
    return [Answer(**each) for each in json.loads(done.stdout)]


class _Client:
    def __init__(self, load: Load, http: httpx.AsyncClient) -> None:
        self._load, self._http = load, http
        self._begin = time.perf_counter()
        self.answers: list[Answer] = []

    async def run(self) -> None:
        """Sends all requests, and waits for the answers."""
        tasks = [task async for task in self._sent()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_PATIENCE)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sent(self) -> AsyncIterator[asyncio.Task[Any]]:
        if self._load.rate is None:
            for _ in range(self._load.clients):
                yield asyncio.create_task(self._one_after_another())
            await asyncio.sleep(self._load.seconds)
            return
        numbers, due = random.Random(self._load.seed), 0.0
        while (due := due + numbers.expovariate(self._load.rate)) < self._load.seconds:
            await asyncio.sleep(max(0.0, due - self._now()))
            yield asyncio.create_task(self._ask(due))

    async def _one_after_another(self) -> None:
        while (now := self._now()) < self._load.seconds:
            answer = await self._ask(now)
            if not answer.is_good:
                await asyncio.sleep(0.1)

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _ask(self, due: float) -> Answer:
        answer = Answer(len(self.answers) % len(self._load.bodies), due)
        self.answers.append(answer)
        body = self._load.bodies[answer.body]
        try:
            async with self._http.stream("POST", self._load.url, json=body) as response:
                answer.status, answer.retry_after = response.status_code, response.headers.get("retry-after")
                if self._load.streams:
                    answer.content = await self._text(answer, response)
                else:
                    content = await response.aread()
                    answer.content = json.loads(content) if answer.status == 200 else content.decode()[:200]
        except httpx.HTTPError:
            answer.status = 0
        else:
            answer.end = self._now()
        return answer

    async def _text(self, answer: Answer, response: httpx.Response) -> str:
        """Returns the text of a chat completion's events."""
        texts = []
        async for line in response.aiter_lines():
            if line.startswith("data:") and not line.endswith("[DONE]"):
                choices = json.loads(line.removeprefix("data:")).get("choices") or [{}]
                texts.append((choices[0].get("delta") or {}).get("content") or "")
                if texts[-1] and answer.first is None:
                    answer.first = self._now()
        return "".join(texts)


async def _main(load: Load) -> list[Answer]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        client = _Client(load, http)
        await client.run()
    return client.answers


if __name__ == "__main__":
    found = asyncio.run(_main(Load(**json.load(sys.stdin))))
    print(json.dumps([dataclasses.asdict(answer) for answer in found]))
