"""The servers, each in processes of its own, which end with the block that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil

from benchmarks.machine import ROOT
from benchmarks.memory import child_environment

# Seconds in which a model is loaded and warmed up.
PATIENCE = 300.0


@dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
        url: its address.
        process: the one that was started; it may have started others.
    """

    url: str
    process: subprocess.Popen[bytes]

    def memory(self) -> int:
        """Bytes of the resident sets of all of its processes."""
        own = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (own, *own.children(recursive=True)))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def fastgen_serve(name: str, folder: Path, *options: str, environment: Mapping[str, str] = {}) -> Iterator[Server]:
    """`fastgen-serve` with a model. What its log says is not kept."""
    words = ["-m", "fastgen_serve.main", f"{name}={folder}", *options]
    with _started(words, "/ready", environment) as server:
        yield server


@contextlib.contextmanager
def service(kind: str, folder: Path, wait_ms: int) -> Iterator[Server]:
    """A service of FastAPI that batches what comes (`service.py`), over "transformers" or "ctranslate2"."""
    words = ["-m", "benchmarks.serving.service", kind, str(folder), "--wait-ms", str(wait_ms)]
    with _started(words, "/ready") as server:
        yield server


@contextlib.contextmanager
def transformers_serve(folder: Path, continuous: bool) -> Iterator[Server]:
    """`transformers serve` with a model in float32."""
    words = ["-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu", "--dtype", "float32"]
    words += ["--continuous-batching"] if continuous else []
    with _started(words, "/health") as server:
        yield server


@contextlib.contextmanager
def _started(words: list[str], ready: str, environment: Mapping[str, str] = {}) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, surroundings = [sys.executable, *words, "--port", str(port)], {**child_environment(None), **environment}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=surroundings, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            _wait(server, ready, log)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and those that it has started
            process.wait()


def _wait(server: Server, path: str, log: IO[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(server.url + path, timeout=5).status_code == 200:
                return
        if not server.is_alive or time.monotonic() > end:
            log.seek(0)
            said = log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"the server is not ready: {server.process.args}\n{said}")
        time.sleep(0.5)
