"""The options of a server, checked, as one value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DTYPES = ("fp32", "fp16", "bf16")
WEIGHT_DTYPES = ("fp32", "int8", "int4", "bf16")
SCHEDULERS = ("hungry", "lazy", "naive", "none")
# How the address of a Redis server begins.
REDIS = ("redis://", "rediss://", "unix://")
# A site, as browsers write it in the header Origin; or any.
_ORIGIN = re.compile(r"\*|https?://[^/?#@\s]+|[a-z][a-z0-9+.-]*-extension://[^/?#@\s]+")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class ServeSettings:
    """What a server does, and how much of it.

    Attributes:
        models: name under which each model is served, and its directory or hub name. The first is the default.
        host, port: what the server listens at.
        slots: rows of a decode step.
        max_waiting: requests of a model that may wait for slots: more get 429.
        slo_ms: latency budget of a request, in milliseconds: a request that finds no slots and would not be answered
            within it gets 429, and `scheduler` "lazy" waits until half of it is used. None for no budget.
        scheduler: when a batch of inputs to encode starts: "hungry", as soon as the model is idle, or "lazy". For
            comparisons: "naive", batches in the order in which inputs come, and "none", no batches.
        dtype: of the weights.
        weight_dtype: that linear layers multiply with, as `fastgen.enable(weight_dtype=...)` takes it.
        threads: of each model's process; None for one on each core.
        cache_gib: GiB of K and V that the requests of a model may have stored at a time, infinity for any number; None
            for a quarter of the memory that is free once its weights are read, divided by the number of models.
        max_body_bytes: of a request.
        max_tokens: new tokens that a request may ask for.
        max_beams: beams, or sequences, of a request; at most `slots`.
        max_batch: inputs of a request.
        request_timeout_s: seconds that a request may take.
        drain_s: seconds in which requests may end once the server is told to stop.
        api_keys: with one of which clients come; none for anybody.
        cors_origins: sites whose pages may ask the server from browsers, such as "https://example.org"; "*" for all.
        cache: of responses: a size such as "256MiB" in memory, or "redis://..."; None for none.
        languages: by model, the pairs of languages that it translates, where its files do not say that, or say more.
        translation_prefix: in front of each sentence that such a model translates: {source} and {target} stand for the
            English names of the languages.
        log_texts: inputs are written to the log.
        warm_up: steps are captured before a model is ready.
        ray: address of the Ray cluster to serve on, "local" for one on this machine; None to serve without Ray.
        replicas: of the application, on Ray.
        max_replicas: that there may be when there are many requests; None for no more.
        requests_per_replica: that wait or run, above which there are more replicas; None for as many as `slots`.

    Raises:
        ValueError: an option has a value that it cannot have.
    """

    models: tuple[tuple[str, str], ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 64
    max_waiting: int = 256
    slo_ms: float | None = None
    scheduler: str = "hungry"
    dtype: str = "fp32"
    weight_dtype: str = "fp32"
    threads: int | None = None
    cache_gib: float | None = None
    max_body_bytes: int = 4 * 2**20
    max_tokens: int = 4096
    max_beams: int = 16
    max_batch: int = 256
    request_timeout_s: float = 600.0
    drain_s: float = 30.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    cache: str | None = field(default=None, repr=False)  # the address of a Redis server may have a password
    languages: Mapping[str, frozenset[tuple[str, str]]] = field(default_factory=dict)
    translation_prefix: str = ""
    log_texts: bool = False
    warm_up: bool = True
    ray: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    requests_per_replica: int | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.models]
        for name in names:
            if not name or not name.isprintable():
                raise ValueError(f"models: {name!r} is no name")
            if names.count(name) > 1:
                raise ValueError(f"models: two are named {name}: give one another name, NAME=MODEL")
        for name in self.languages:
            if name not in names:
                raise ValueError(f"languages: no model is named {name}")
        for option in ("slots", "max_body_bytes", "max_tokens", "max_beams", "max_batch", "replicas"):
            _check(option, getattr(self, option), least=1)
        for option in ("max_waiting", "drain_s"):
            _check(option, getattr(self, option), least=0)
        if self.cache is not None and not self.cache.startswith(REDIS):
            bytes_of(self.cache)
        for option, least in (("threads", 1), ("max_replicas", self.replicas), ("requests_per_replica", 1)):
            if getattr(self, option) is not None:
                _check(option, getattr(self, option), least)
        if self.ray is None and (self.replicas > 1 or self.max_replicas is not None):
            raise ValueError("replicas are Ray's: give --ray, too")
        if self.ray is not None and self.port == 0:
            raise ValueError("port is 0: give the one that Ray listens at on each machine")
        for option in ("slo_ms", "request_timeout_s", "cache_gib"):
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise ValueError(f"{option} is {value}: give a positive number")
        if self.scheduler == "lazy" and self.slo_ms is None:
            raise ValueError("scheduler is lazy, which needs a latency budget: give --slo-ms, too")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}: give one from 0 to 65535")
        for option, known in (("dtype", DTYPES), ("weight_dtype", WEIGHT_DTYPES), ("scheduler", SCHEDULERS)):
            if getattr(self, option) not in known:
                raise ValueError(f"{option} is {getattr(self, option)!r}; known: {', '.join(known)}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ValueError("api_keys: a key has characters of ASCII only, and one at least")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origin is {origin!r}: give a site without a path, https://HOST[:PORT], or *")

    def url(self, port: int | None = None) -> str:
        """Where the server is; at another port than `port`, where 0 stood for a free one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port if port is None else port}"

    def path(self, name: str) -> str:
        """The directory, or the hub name, of the model that is served under this name. Raises KeyError."""
        return dict(self.models)[name]


def _check(option: str, value: float, least: int) -> None:
    if not value >= least:
        raise ValueError(f"{option} is {value}: give {least} or more")


def bytes_of(cache: str) -> int:
    """The size that is given for a cache in memory. Raises ValueError where it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", cache)
    if found is None or found[2] not in _UNITS:
        # An address may have a password: it is not repeated.
        raise ValueError("cache: give a size, such as 256MiB, or the address of a Redis server, redis://HOST:PORT/0")
    return int(float(found[1]) * _UNITS[found[2]])
