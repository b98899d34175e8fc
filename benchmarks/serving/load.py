"""The client: sends requests to a server and notes when answers came. A process of its own, `python -m
benchmarks.serving.load`, which reads a `Load` as JSON from standard input and writes what it saw to standard output.

Open: requests come when they come (Poisson), whether or not others are answered; one that the client sends late counts
from when it was due. Closed: so many clients, each of which waits for its answer before it sends the next request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

# Seconds in which answers may come after the last request.
PATIENCE = 60.0


@dataclass
class Load:
    """What to send.

    Attributes:
        url: of the path that all requests are for.
        bodies: of the requests, in order, from the beginning again after the last one.
        seconds: in which requests are sent.
        rate: requests in a second, on average, if they come by themselves.
        clients: that wait for their answers, otherwise.
        streams: answers are server-sent events.
        seed: of when requests come.
        patience: seconds in which answers may come after the last request.
    """

    url: str
    bodies: Sequence[Any]
    seconds: float
    rate: float | None = None
    clients: int | None = None
    streams: bool = False
    seed: int = 0
    patience: float = PATIENCE


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        body: its index.
        due: seconds from the beginning until it was to be sent.
        first: until the first text came, of a stream; None for none.
        end: until all of the answer had come; None for none within the patience.
        status: of HTTP; 0 where the connection failed.
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
        """Seconds from when it was due."""
        return float("inf") if self.end is None else self.end - self.due


@dataclass
class Seen:
    """What a load has come to.

    Attributes:
        seconds: in which requests were sent, of the load.
        cpu: seconds of a processor that the client took.
    """

    seconds: float
    answers: list[Answer] = field(default_factory=list)
    cpu: float = 0.0


def run(load: Load) -> Seen:
    """Sends a load from a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; what it said is on standard error.
    """
    from benchmarks.machine import ROOT  # which the process itself does without: it starts fast
    from benchmarks.memory import child_environment

    command = [sys.executable, "-m", "benchmarks.serving.load"]
    asked = json.dumps(dataclasses.asdict(load)).encode()
    made = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=True, cwd=ROOT, env=child_environment(1))
    found = json.loads(made.stdout)
    return Seen(load.seconds, [Answer(**each) for each in found["answers"]], found["cpu"])


class _Client:
    def __init__(self, load: Load, http: httpx.AsyncClient) -> None:
        self._load, self._http = load, http
        self._numbers = itertools.count()
        self._begin = time.perf_counter()
        self.answers: list[Answer] = []

    async def run(self) -> None:
        """Sends everything, and waits for the answers."""
        tasks = [task async for task in self._sent()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._load.patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sent(self) -> Any:
        if self._load.rate is None:
            for _ in range(self._load.clients or 1):
                yield asyncio.create_task(self._one_after_another())
            await asyncio.sleep(self._load.seconds)
            return
        for due in self._arrivals(self._load.rate):
            await asyncio.sleep(max(0.0, due - self._now()))
            yield asyncio.create_task(self._ask(due))

    def _arrivals(self, rate: float) -> Iterator[float]:
        numbers, due = random.Random(self._load.seed), 0.0
        while (due := due + numbers.expovariate(rate)) < self._load.seconds:
            yield due

    async def _one_after_another(self) -> None:
        while (now := self._now()) < self._load.seconds:
            answer = await self._ask(now)
            if not answer.is_good:
                await asyncio.sleep(0.1)

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _ask(self, due: float) -> Answer:
        number = next(self._numbers) % len(self._load.bodies)
        answer = Answer(number, due)
        self.answers.append(answer)
        try:
            await (self._stream if self._load.streams else self._post)(answer)
        except httpx.HTTPError:
            answer.status = 0
        else:
            answer.end = self._now()
        return answer

    async def _post(self, answer: Answer) -> None:
        response = await self._http.post(self._load.url, json=self._load.bodies[answer.body])
        answer.status, answer.retry_after = response.status_code, response.headers.get("retry-after")
        answer.content = response.json() if answer.status == 200 else response.text[:200]

    async def _stream(self, answer: Answer) -> None:
        async with self._http.stream("POST", self._load.url, json=self._load.bodies[answer.body]) as response:
            answer.status, texts = response.status_code, []
            async for line in response.aiter_lines():
                text = _text(line)
                if text and answer.first is None:
                    answer.first = self._now()
                texts.append(text)
            answer.content = "".join(texts)


def _text(line: str) -> str:
    """The text of an event of a chat completion."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return ""
    choices = json.loads(line.removeprefix("data:")).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


async def _main(load: Load) -> Seen:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        client = _Client(load, http)
        await client.run()
    return Seen(load.seconds, client.answers, time.process_time())


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(asyncio.run(_main(Load(**json.load(sys.stdin)))))))
