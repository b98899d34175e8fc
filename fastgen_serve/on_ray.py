"""The server on Ray Serve: the application in several replicas, on one machine or many.

A replica is an actor of Ray. It has the application that the command serves without Ray, with a process for each
model. Ray's proxies take the requests, and give each to a replica that has few. Ray replaces replicas that are lost,
and has as many as the requests need.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders

from fastgen.pipeline.errors import SetupError, check_installed, explained
from fastgen.pipeline.generation.on_ray import LOCAL, cluster
from fastgen_serve import guard, log
from fastgen_serve.app import create_app
from fastgen_serve.errors import Unavailable
from fastgen_serve.settings import ServeSettings

# What Ray calls the application.
NAME = "fastgen-serve"
_INSTALL = "pip install 'fastgen-transformers[ray]'"
_log = logging.getLogger("fastgen_serve")
# Ray would leave out lines of the log that differ in numbers only, write others in colours, and, in a cluster on this
# machine, let every other program go first, and give up a proxy after 5 s while the machine is busy.
_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
# Requests of a replica beyond those that its models take, which it refuses or answers itself.
_MORE_REQUESTS = 100
# Replicas that cannot begin before a deployment has failed.
_TRIES = 2
# Seconds between two looks of a replica at its models while they are loaded, and at its requests before it ends.
_LOOK, _LAST_LOOK = 0.1, 0.5
# Seconds between two health checks, three of which must fail; and in which the processes of the models end.
_HEALTH, _PATIENCE = 2.0, 10.0
# How Ray writes a `PipelineError` of a replica, in a traceback.
_REASON = re.compile(r"^fastgen\.pipeline\.errors\.\w+: (.+)$", re.MULTILINE)


def run(settings: ServeSettings) -> int:
    """Serves on the cluster `settings.ray` until SIGTERM or Ctrl-C. A second signal does not wait for requests.

    Returns the exit status of the command.

    Raises:
        SetupError: Ray is not installed or not there, its proxies cannot listen, or a model cannot be loaded.
        KeyboardInterrupt: at a signal before there is a cluster, or a second one.
    """
    check_installed("ray", "--ray", _INSTALL)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with explained(f"--ray needs Ray Serve: {_INSTALL}"):
        import ray.serve  # noqa: F401
    assert settings.ray is not None
    _log.info("%s (replicas are loading)", settings.url())
    with cluster(settings.ray, most_replicas(settings) * cpus(settings), log_to_driver=True):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set its own
        try:
            _deploy(settings)
            _log.info("ready (replicas: %d)", settings.replicas)
            threading.Event().wait()
        except KeyboardInterrupt:
            _log.info("stopping: requests have %g s at the most", settings.drain_s)
        finally:
            _end(settings)
    return 0


def most_replicas(settings: ServeSettings) -> int:
    """Replicas that there may be."""
    return settings.max_replicas or settings.replicas


def cpus(settings: ServeSettings) -> int:
    """Those that a replica takes of the cluster: one for each thread of its models."""
    return len(settings.models) * (settings.threads or 1)


def application(settings: ServeSettings) -> Any:
    """What Ray Serve runs: an `Application` of it, with one deployment."""
    from ray import serve

    def build() -> FastAPI:  # in the process of a replica
        return _built(settings)

    ongoing = len(settings.models) * (settings.slots + settings.max_waiting) + _MORE_REQUESTS
    number: dict[str, Any] = {"num_replicas": settings.replicas}
    if most_replicas(settings) > settings.replicas:
        target = settings.requests_per_replica or settings.slots
        number = {
            "autoscaling_config": {
                "min_replicas": settings.replicas,
                "max_replicas": most_replicas(settings),
                "target_ongoing_requests": target,
            }
        }
    deployment = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": cpus(settings)},
        max_ongoing_requests=ongoing,  # the replicas refuse more themselves, with 429
        max_constructor_retry_count=_TRIES,
        health_check_period_s=_HEALTH,
        graceful_shutdown_wait_loop_s=_LAST_LOOK,
        graceful_shutdown_timeout_s=settings.drain_s + _PATIENCE,
        **number,
    )
    return deployment(serve.ingress(build)(Replica)).bind()


class Replica:
    """The application as Ray Serve runs it.

    Attributes:
        app: the application, which Ray Serve puts here.
    """

    app: Any
    _has_begun = False

    async def check_health(self) -> None:
        """Whether the models are there. The first time, this waits until they are: then requests come.

        Ray replaces a replica for which this has raised three times in a row. A process of a model that is started
        again soon enough does not show.

        Raises:
            SetupError: a model cannot be loaded.
            Unavailable: the process of a model has died, and is not there again.
        """
        models, reasons = self.app.state.models, self.app.state.reasons
        while not (self._has_begun or models.are_ready or reasons):
            await asyncio.sleep(_LOOK)
        if reasons:
            raise SetupError(reasons[0])
        self._has_begun = True
        missing = [model.name for model in models if not model.is_ready]
        if missing:
            raise Unavailable(f"not ready: {', '.join(missing)}")


def _built(settings: ServeSettings) -> FastAPI:
    """The application of a replica. Its `state.reasons` are those for which models cannot be loaded."""
    logging.basicConfig(format=f"{NAME}: %(message)s")
    _log.setLevel(logging.INFO)
    log.to_standard_error()
    reasons: list[str] = []
    app = create_app(settings, on_broken=reasons.append)
    app.state.reasons = reasons
    app.add_middleware(_WithoutId)
    return app


class _WithoutId:
    """Leaves X-Request-Id out of responses, as Ray's proxies add it: the client's, or the one that they have given."""

    def __init__(self, app: guard.App) -> None:
        self._app = app

    async def __call__(self, scope: guard.Message, receive: guard.Receive, send: guard.Send) -> None:
        async def send_without(message: guard.Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await self._app(scope, receive, send_without)


def _deploy(settings: ServeSettings) -> None:
    """Returns when all replicas are ready.

    Raises:
        SetupError: they cannot be.
    """
    import ray
    from ray import serve

    needed, there = settings.replicas * cpus(settings), ray.cluster_resources().get("CPU", 0)
    if there < needed:
        _log.warning("the cluster has %g CPUs, and the replicas take %d: they wait for more", there, needed)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    with explained(f"Ray's proxies do not begin at {settings.url()} (--host, --port)", _last_line):
        serve.start(http_options={"host": settings.host, "port": settings.port}, logging_config=quiet)
    with explained("the replicas cannot begin", _reason):
        serve.run(application(settings), name=NAME, route_prefix="/", logging_config=quiet)


def _end(settings: ServeSettings) -> None:
    """Has the replicas finish what they do, and ends them; and Ray Serve, where nothing else runs on it."""
    from ray import serve

    while NAME in serve.status().applications:
        with suppress(TimeoutError):  # Ray waits for a minute
            serve.delete(NAME)
    if settings.ray != LOCAL and not serve.status().applications:
        serve.shutdown()


def _reason(error: Exception) -> str:
    """Why replicas could not begin, of what Ray says of them."""
    from ray import serve

    status = serve.status().applications.get(NAME)
    said = [str(error), *(each.message for each in (status.deployments.values() if status else ()))]
    found = _REASON.findall("\n".join(said))
    return str(found[-1]) if found else _last_line(error)


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
