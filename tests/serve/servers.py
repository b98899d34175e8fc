"""Servers that tests start: one in a thread of this process, and the command as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from fastgen_serve.models import Models

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"
BART, GPT2 = str(MODELS / "kjv-bart"), str(MODELS / "kjv-gpt2")
# Seconds until something has happened: far more than it takes.
WAIT = 300.0


@contextlib.contextmanager
def in_thread(app: Any, **options: Any) -> Iterator[str]:
    """The address of an application that is served in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    options = {"log_level": "warning", "access_log": False, "lifespan": "on", **options}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        listening.close()


def connected(url: str) -> socket.socket:
    """A connection to a server, for what a client does not send."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def damaged(folder: Path) -> Path:
    """A model whose weights cannot be read."""
    shutil.copytree(GPT2, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


class Clock:
    """Says what time a test has made it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SharedModels(Models):
    """Models that go on when a server of several ends."""

    async def stop(self) -> None:
        """They are another one's to end."""


@dataclass
class Command:
    """`fastgen-serve` as a process of its own.

    Attributes:
        lines: what it has written to standard error so far.
    """

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Its address, once it listens."""
        return next(line for line in self.lines if "http://" in line).split()[1]

    def wait_until_ready(self) -> None:
        until(lambda: any("http://" in line for line in self.lines) or self.process.poll() is not None)
        until(lambda: self.process.poll() is not None or _is_ready(self.url), every=0.2)
        assert self.process.poll() is None, "\n".join(self.lines)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(WAIT)


@contextlib.contextmanager
def command(*words: str, planted: str = "", python: str | Path = sys.executable) -> Iterator[Command]:
    """`fastgen-serve` with these words, on a free port, if they name none; in its process `planted` is run before."""
    program = ["-c", f"{planted}\nfrom fastgen_serve.main import main\nraise SystemExit(main())"]
    port = () if "--port" in words else ("--port", "0")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [str(python), *(program if planted else ["-m", "fastgen_serve.main"]), *words, *port],
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    made = Command(process)
    reader = threading.Thread(target=_read, args=(process.stderr, made.lines), daemon=True)
    reader.start()
    try:
        yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(WAIT)
        reader.join(WAIT)


LONG = {"prompt": "in the beginning", "max_tokens": 400, "min_tokens": 400, "num_beams": 1, "temperature": 0}
SHORT = {"prompt": "in the beginning", "max_tokens": 5, "num_beams": 1, "temperature": 0}


def ask(server: Command, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT)


def in_background(count: int, server: Command, **body: Any) -> list[Future[httpx.Response]]:
    """The answers to requests that run meanwhile."""
    pool = ThreadPoolExecutor(count)
    return [pool.submit(ask, server, **body) for _ in range(count)]


def running(server: Command) -> int:
    """Sequences that wait or run."""
    found = re.findall(r"^fastgen_in_flight\{.*\} (\d+)", httpx.get(f"{server.url}/metrics", timeout=WAIT).text, re.M)
    return sum(map(int, found))


def until(condition: Any, every: float = 0.02) -> None:
    """Waits for a condition."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(every)


async def happens(condition: Callable[[], Any]) -> None:
    """Waits for a condition, and leaves the event loop to others meanwhile."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), WAIT)


def _read(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip("\n"))


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
