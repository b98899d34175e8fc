"""The server's options, validated, as one value."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fastgen.pipeline.settings import DTYPES, dtype_named, must_be
from fastgen.settings import CHOICES

SCHEDULERS = ("hungry", "lazy", "naive", "none")
# Prefixes of a Redis server's address.
REDIS = ("redis://", "rediss://", "unix://")
# A site, as browsers write it in the Origin header; or any.
_ORIGIN = re.compile(r"\*|https?://[^/?#@\s]+|[a-z][a-z0-9+.-]*-extension://[^/?#@\s]+")
# Fields with several values, whose types are not checked.
_OF_SEVERAL = ("models", "api_keys", "cors_origins", "languages")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _option(default: Any, help: str, group: str = "", *, repr: bool = True, **more: Any) -> Any:
    """Declares a field that is also a command-line option.

    Args:
        default: the default value, or a function that returns it.
        group: title of the group of options that begins with this one.
        more: `name` of the option, if it differs from the field's; a number's bound, `least` or `above`; and other
            arguments of `add_argument`.
    """
    about = {name: more.pop(name, None) for name in ("name", "least", "above")}
    kind: Any = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, repr=repr, metadata={**about, "group": group, "parser": {"help": help, **more}})


@dataclass(frozen=True)
class ServeSettings:
    """The server's settings. The docstring below an option says what its help text does not.

    Raises:
        ValueError: an option has an invalid value.
    """

    host: str = _option("127.0.0.1", "address to listen at; 0.0.0.0 for all", "where")
    port: int = _option(8000, "0 for a free one")
    models: tuple[tuple[str, str], ...] = _option(
        (), "a name for each model", name="served-model-name", nargs="+", metavar="NAME"
    )
    """The name under which each model is served, and its directory or hub name. The first is the default."""
    api_keys: tuple[str, ...] = _option(
        (), "keys that clients must have, one a line", name="api-key-file", repr=False, metavar="FILE"
    )
    """Empty to require no key."""
    cors_origins: tuple[str, ...] = _option(
        (),
        "a site whose pages may ask from browsers, * for any; may be repeated",
        name="cors-origin",
        action="append",
        metavar="ORIGIN",
    )

    dtype: str = _option(
        "fp32", "of the weights; auto: as the checkpoint says", "models", choices=tuple(DTYPES), type=dtype_named
    )
    weight_dtype: str = _option(
        "fp32", "that linear layers multiply with: others than fp32 change results", choices=CHOICES["weight_dtype"]
    )
    warm_up: bool = _option(True, "capture steps before a model is ready", action=argparse.BooleanOptionalAction)
    slots: int = _option(64, "rows of a decode step", least=1)
    prompt_lookup_num_tokens: int = _option(
        15, "that a model without encoder verifies at once of what a request repeats; 0 for none", least=0, metavar="N"
    )
    """Results stay the same. Free rows verify the drafted tokens, if that yields more tokens a second."""
    threads: int | None = _option(None, "of each model's process; one on each core by default", least=1)
    cache_gib: float | None = _option(
        None,
        "of K and V, for each model; by default its part of a quarter of what is free",
        above=0,
        metavar="GIB",
    )
    """Limits the running requests; infinity for no limit. By default a quarter of the memory that is free once the
    weights are loaded, divided by the number of models.
    """
    scheduler: str = _option(
        "hungry", "when a batch is encoded: at once, or when it uses up half of --slo-ms", choices=SCHEDULERS
    )
    """For comparisons: "naive", batches in the order of arrival, and "none", no batches."""
    slo_ms: float | None = _option(None, "latency budget of a request, in milliseconds", above=0, metavar="MS")
    """A request that finds no free slot and would miss the budget gets 429. None for no budget."""
    cache: str | None = _option(None, 'of responses: "256MiB" in memory, or "redis://..."', repr=False)

    languages: Mapping[str, frozenset[tuple[str, str]]] = _option(
        dict,
        "pairs that a model translates",
        "translation (without these the files of the models say what they translate)",
        nargs="+",
        metavar="[NAME=]en:de,...",
    )
    """By model."""
    translation_prefix: str = _option("", "before each sentence; {source} and {target} are names", metavar="TEXT")
    """In English."""

    max_waiting: int = _option(256, "sequences of a model that wait; more get 429", "limits", least=0)
    max_body_bytes: int = _option(4 * 2**20, "of a request", least=1)
    max_tokens: int = _option(4096, "new tokens of a request", least=1)
    max_beams: int = _option(16, "beams, or sequences, of a request", least=1)
    """At most `slots`."""
    max_batch: int = _option(2048, "inputs of a request", least=1)
    """The default is OpenAI's limit for embeddings; clients send batches of 1000."""
    max_images: int = _option(8, "images of a request", least=0)
    max_image_bytes: int = _option(16 * 2**20, "of an image's file", least=1)
    max_image_pixels: int = _option(2**24, "of all images of a request together", least=1)
    max_audio_bytes: int = _option(25 * 2**20, "of a recording's file", least=1)
    """The default is OpenAI's limit."""
    max_audio_seconds: float = _option(1800.0, "of a recording", above=0, metavar="SECONDS")
    request_timeout_s: float = _option(600.0, "seconds that a request may take", above=0, metavar="SECONDS")
    drain_s: float = _option(30.0, "seconds in which requests may end on SIGTERM", least=0, metavar="SECONDS")

    ray: str | None = _option(
        None,
        "serve on a Ray cluster: its address, or local for one on this machine",
        "many machines",
        nargs="?",
        const="local",
        metavar="ADDRESS",
    )
    replicas: int = _option(1, "of the server, on Ray", least=1)
    max_replicas: int | None = _option(None, "that there may be when there are many requests")
    requests_per_replica: int | None = _option(None, "above which there are more replicas; --slots by default", least=1)
    """Counts waiting and running requests."""

    log_texts: bool = _option(False, "write inputs to the log", "log", action="store_true")

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(ServeSettings).items():
            must = None if name in _OF_SEVERAL else must_be(getattr(self, name), hint)
            if must is not None:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {must}")
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        names = [name for name, _ in self.models]
        for name in names:
            if not name or not name.isprintable():
                raise ValueError(f"models: {name!r} is no name")
            if names.count(name) > 1:
                raise ValueError(f"models: two are named {name}: give one another name, NAME=MODEL")
        for name in self.languages:
            if name not in names:
                raise ValueError(f"languages: no model is named {name}")
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.metadata)
        _check("max_replicas", self.max_replicas, {"least": self.replicas})
        if self.cache is not None and not self.cache.startswith(REDIS):
            bytes_of(self.cache)
        if self.ray is None and (self.replicas > 1 or self.max_replicas is not None):
            raise ValueError("replicas are Ray's: give --ray, too")
        if self.ray is not None and self.port == 0:
            raise ValueError("port is 0: give the one that Ray listens at on each machine")
        if self.scheduler == "lazy" and self.slo_ms is None:
            raise ValueError("scheduler is lazy, which needs a latency budget: give --slo-ms, too")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}: give one from 0 to 65535")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ValueError("api_keys: a key has characters of ASCII only, and one at least")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origin is {origin!r}: give a site without a path, https://HOST[:PORT], or *")

    def url(self, port: int | None = None) -> str:
        """Returns the server's URL; with `port` in place of its own, if that is 0 for a free one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port if port is None else port}"

    def path(self, name: str) -> str:
        """Returns the directory, or the hub name, of the model that is served under this name. Raises KeyError."""
        return dict(self.models)[name]


def _check(option: str, value: Any, about: Mapping[str, Any]) -> None:
    choices, least, above = about.get("parser", {}).get("choices"), about.get("least"), about.get("above")
    if choices is not None and value not in choices:
        raise ValueError(f"{option} is {value!r}; known: {', '.join(choices)}")
    if value is not None and least is not None and not value >= least:
        raise ValueError(f"{option} is {value}: give {least} or more")
    if value is not None and above is not None and not value > above:
        raise ValueError(f"{option} is {value}: give a positive number")


def bytes_of(cache: str) -> int:
    """Returns the size of a memory cache in bytes. Raises ValueError for an invalid size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", cache)
    if found is None or found[2] not in _UNITS:
        # Does not quote the value: an address may contain a password.
        raise ValueError("cache: give a size, such as 256MiB, or the address of a Redis server, redis://HOST:PORT/0")
    return int(float(found[1]) * _UNITS[found[2]])
