"""`fastgen-serve MODEL [MODEL ...]`: serves models over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from fastgen_serve import keys
from fastgen_serve.settings import ServeSettings
from fastgen_serve.translation.pairs import parse as read_pairs

PROGRAM = "fastgen-serve"
DONE, SETUP, INTERRUPTED = 0, 2, 130
# The packages that the server needs to start, by import name, and how to install them.
_PACKAGES = ("transformers", "fastapi", "uvicorn", "httptools", "prometheus_client", "python_multipart", "py3langid")
_INSTALL = "pip install 'fastgen-transformers[transformers,serve]'"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_say = logging.getLogger("fastgen_serve")


class UsageError(Exception):
    """The command line is invalid."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status."""
    try:
        settings = read(sys.argv[1:] if arguments is None else list(arguments))
    except UsageError as error:
        return _fail(f"{error} ({PROGRAM} --help)")
    logging.basicConfig(format=f"{PROGRAM}: %(message)s", level=logging.INFO, stream=sys.stderr)
    with _ends_on_sigterm():
        return _run(settings)


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the process until the server handles signals, with the status of a stopped server.

    Imports take seconds. Without a handler the signal would be lost meanwhile in a container, because its first process
    only gets signals that it handles.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: _leave(DONE))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(settings: ServeSettings) -> int:
    from fastgen.pipeline.errors import PipelineError, check_installed

    if settings.host not in _LOCAL and not settings.api_keys:
        _say.warning("anybody who reaches %s may use it: --api-key-file asks for keys", settings.host)
    try:
        for package in _PACKAGES:
            check_installed(package, PROGRAM, _INSTALL)
        tempfile.gettempdir()  # torch cannot be imported without a temporary directory
        if settings.ray is not None:
            from fastgen_serve import on_ray

            if settings.ray == on_ray.LOCAL:
                listen(settings).close()
            return on_ray.run(settings)
        listening = listen(settings)
        asyncio.run(_serve(settings, listening))
    except (PipelineError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:  # before the server handles signals
        return INTERRUPTED


def read(words: Sequence[str]) -> ServeSettings:
    """Parses a command line into settings.

    Raises:
        UsageError: it is invalid.
    """
    parser = _parser()
    given = vars(parser.parse_args(words))
    models, names = given.pop("models"), given.pop("served_model_name")
    key_file, languages = given.pop("api_key_file"), given.pop("languages") or ()
    origins = tuple(given.pop("cors_origin") or ())
    if names and len(names) != len(models):
        raise UsageError(f"--served-model-name has {len(names)} names for {len(models)} models")
    named = [_named(model) for model in models]
    if names:
        named = [(name, path) for name, (_, path) in zip(names, named, strict=True)]
    try:
        api_keys = keys.read(key_file) if key_file else ()
        pairs = dict(_languages(words, named[0][0]) for words in languages)
        return ServeSettings(models=tuple(named), api_keys=api_keys, cors_origins=origins, languages=pairs, **given)
    except OSError as error:
        raise UsageError(f"cannot read {key_file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _named(model: str) -> tuple[str, str]:
    """Returns the name and the path of a model, from NAME=PATH or a path."""
    name, equals, path = model.partition("=")
    if equals and path and "/" not in name and not os.path.exists(model):
        return name, path
    return (os.path.basename(os.path.abspath(model)) if os.path.exists(model) else model), model


def _languages(words: str, first: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Returns a model (by default the first) and its language pairs, from [NAME=]en:de,en:fr. Raises ValueError."""
    name, equals, pairs = words.rpartition("=")
    return name if equals else first, read_pairs(pairs)


def _parser() -> argparse.ArgumentParser:
    default = ServeSettings()
    parser = _Parser(
        prog=PROGRAM,
        description="Serves models of Transformers over HTTP, with the interfaces of OpenAI, vLLM and LibreTranslate.",
        epilog="Example: fastgen-serve examples/models/kjv-bart --port 8000",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a directory, a hub name, or NAME=one of these")

    group: Any = None
    for each in dataclasses.fields(ServeSettings):
        about = each.metadata
        group = parser.add_argument_group(about["group"]) if about["group"] else group
        name = about["name"] or each.name.replace("_", "-")
        kind: Any = {"int": {"type": int}, "float": {"type": float}}.get(str(each.type).partition(" ")[0], {})
        dest = name.replace("-", "_")
        group.add_argument(f"--{name}", dest=dest, default=getattr(default, dest, None), **kind, **about["parser"])
    return parser


def _fail(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return SETUP


def listen(settings: ServeSettings) -> socket.socket:
    """Returns a listening socket, so that a problem with the address is reported before a model is loaded."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
        # Connections inherit TCP_NODELAY. Without it a body waits 40 ms after its head for the client's delayed ACK:
        # asyncio sets the option only on sockets that name their protocol.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise OSError(f"cannot listen at {where}: {error.strerror or error} (--host, --port)") from error


async def _serve(settings: ServeSettings, listening: socket.socket) -> NoReturn:
    from fastgen_serve import log
    from fastgen_serve.app import create_app
    from fastgen_serve.server import Server

    app = create_app(settings, on_broken=lambda reason: server.give_up(reason))
    log.to_standard_error()
    _say.info("%s (models are loading)", settings.url(listening.getsockname()[1]))
    server = Server(app, settings)
    await server.serve(sockets=[listening])
    _leave(SETUP if server.has_given_up else DONE)


def _leave(status: int) -> NoReturn:
    """Ends the process without waiting for threads, which may still tokenise texts that nobody waits for."""
    try:
        for child in multiprocessing.active_children():  # left by a server that did not wait for them either
            child.kill()
            child.join()
        logging.shutdown()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main())
