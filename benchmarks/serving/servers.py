"""Starts the servers, each in processes of its own, which end with the block that started them."""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil

from benchmarks import ROOT, processes

# Seconds within which a model must be loaded and warmed up.
_PATIENCE = 300.0


@dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
        url: its address.
        process: the started process; it may have started others.
    """

    url: str
    process: subprocess.Popen[bytes]

    def memory(self) -> int:
        """Returns the bytes of the resident sets of all of its processes."""
        own = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (own, *own.children(recursive=True)))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


def fastgen_serve(
    name: str, folder: Path, *options: str, environment: Mapping[str, str] = {}
) -> AbstractContextManager[Server]:
    """Starts `fastgen-serve` with a model."""
    return started("/ready", "fastgen_serve.main", f"{name}={folder}", *options, environment=environment)


@contextlib.contextmanager
def started(ready: str, *words: str, environment: Mapping[str, str] = {}) -> Iterator[Server]:
    """Starts a module as a server that takes `--port`, and waits until the path `ready` answers. Discards its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, variables = [sys.executable, "-m", *words, "--port", str(port)], processes.environment() | environment
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            _wait(server, ready, log)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
            process.wait()


def _wait(server: Server, path: str, log: IO[bytes]) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(server.url + path, timeout=5).status_code == 200:
                return
        if not server.is_alive or time.monotonic() > end:
            log.seek(0)
            said = log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"the server is not ready: {server.process.args}\n{said}")
        time.sleep(0.5)
