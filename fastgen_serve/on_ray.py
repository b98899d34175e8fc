"""Runs the server on Ray Serve: the application in several replicas, on one machine or many.

A replica is a Ray actor. It holds the same application that the command serves without Ray, with a process for each
model. Ray's proxies accept the requests, and send each to a replica with a short queue. Ray replaces lost replicas, and
scales their number with the load.
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

# The application's name in Ray.
NAME = "fastgen-serve"
_INSTALL = "pip install 'fastgen-transformers[ray]'"
_log = logging.getLogger("fastgen_serve")
# Ray's defaults would drop log lines that differ only in numbers, and write others in colours. In a cluster on this
# machine they would also run workers at a low priority, and give up a proxy after 5 s while the machine is busy.
_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
# Requests that a replica accepts beyond the capacity of its models, to refuse or answer them itself.
_MORE_REQUESTS = 100
# Attempts to start a replica before the deployment fails.
_TRIES = 2
# Seconds between two polls of a replica: of its models while they load, and of its requests before it ends.
_LOOK, _LAST_LOOK = 0.1, 0.5
# Seconds between two health checks, three of which must fail; and for the models' processes to end.
_HEALTH, _PATIENCE = 2.0, 10.0
# How Ray writes a replica's `PipelineError` in a traceback.
_REASON = re.compile(r"^fastgen\.pipeline\.errors\.\w+: (.+)$", re.MULTILINE)


def run(settings: ServeSettings) -> int:
    """Serves on the cluster `settings.ray` until SIGTERM or Ctrl-C. A second signal does not wait for requests.

    Returns the exit status of the command.

    Raises:
        SetupError: Ray is not installed or not reachable, its proxies cannot listen, or a model cannot be loaded.
        KeyboardInterrupt: at a signal before the cluster exists, or at a second one.
    """
    check_installed("ray", "--ray", _INSTALL)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with explained(f"--ray needs Ray Serve: {_INSTALL}"):
        import ray.serve  # noqa: F401
    assert settings.ray is not None
    _log.info("%s (replicas are loading)", settings.url())
    with cluster(settings.ray, most_replicas(settings) * cpus(settings), log_to_driver=True):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces Ray's handler
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
    """Returns the maximum number of replicas."""
    return settings.max_replicas or settings.replicas


def cpus(settings: ServeSettings) -> int:
    """Returns the CPUs that a replica reserves in the cluster: one for each thread of its models."""
    return len(settings.models) * (settings.threads or 1)


def application(settings: ServeSettings) -> Any:
    """Creates the Ray Serve `Application`, with one deployment."""
    from ray import serve

    def build() -> FastAPI:  # runs in the replica's process
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
        max_ongoing_requests=ongoing,  # beyond this the replicas refuse requests with 429
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
        app: the application, which Ray Serve sets.
    """

    app: Any
    _has_begun = False

    async def check_health(self) -> None:
        """Checks that the models are ready. The first check waits for them: Ray then starts to send requests.

        Ray replaces a replica for which this has raised three times in a row. A model's process that restarts soon
        enough goes unnoticed.

        Raises:
            SetupError: a model cannot be loaded.
            Unavailable: a model's process has died, and its successor is not ready.
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
    """Creates the application of a replica. Its `state.reasons` says why models cannot be loaded."""
    logging.basicConfig(format=f"{NAME}: %(message)s")
    _log.setLevel(logging.INFO)
    log.to_standard_error()
    reasons: list[str] = []
    app = create_app(settings, on_broken=reasons.append)
    app.state.reasons = reasons
    app.add_middleware(_WithoutId)
    return app


class _WithoutId:
    """Removes X-Request-Id from responses, because Ray's proxies add the client's, or one of their own."""

    def __init__(self, app: guard.App) -> None:
        self._app = app

    async def __call__(self, scope: guard.Message, receive: guard.Receive, send: guard.Send) -> None:
        async def send_without(message: guard.Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await self._app(scope, receive, send_without)


def _deploy(settings: ServeSettings) -> None:
    """Deploys the replicas, and returns when all are ready.

    Raises:
        SetupError: they cannot start.
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
    """Stops the replicas after their current requests, and Ray Serve if nothing else runs on it."""
    from ray import serve

    while NAME in serve.status().applications:
        with suppress(TimeoutError):  # Ray waits for at most a minute
            serve.delete(NAME)
    if settings.ray != LOCAL and not serve.status().applications:
        serve.shutdown()


def _reason(error: Exception) -> str:
    """Extracts why replicas could not start from Ray's messages."""
    from ray import serve

    status = serve.status().applications.get(NAME)
    said = [str(error), *(each.message for each in (status.deployments.values() if status else ()))]
    found = _REASON.findall("\n".join(said))
    return str(found[-1]) if found else _last_line(error)


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
