"""What the tests of the server share: steps are programs, as for users, here and in processes that tests start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import httpx
import pytest
from openai import OpenAI

import fastgen
from fastgen.ops import gpu
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen_serve import metrics
from fastgen_serve.app import create_app
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import remote as remote_models
from fastgen_serve.workers.local import LocalModel
from tests.serve import checkpoints
from tests.serve.servers import in_thread


@pytest.fixture(scope="module", autouse=True)
def enabled() -> Iterator[None]:
    """The tests have Triton's kernels interpreted otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "is_interpreted", lambda: False)
        patch.delenv("TRITON_INTERPRET", raising=False)
        fastgen.enable()
        yield
        fastgen.enable()
        graph_cache.drop_all()


@pytest.fixture(scope="module")
def forks(enabled: None) -> Iterator[None]:
    """Processes of models are forks of one that has imported what takes long. Those of `fastgen-serve` start anew."""
    context = multiprocessing.get_context("forkserver")
    models = ("auto.modeling_auto", "auto.tokenization_auto", "bart.modeling_bart", "gpt2.modeling_gpt2")
    context.set_forkserver_preload(["torch", "transformers.generation", *(f"transformers.models.{m}" for m in models)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_models, "multiprocessing", SimpleNamespace(get_context=lambda method: context))
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of all kinds, by the names that they are served under."""
    return checkpoints.folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def settings(paths: dict[str, str]) -> ServeSettings:
    """Those of a server with all of them."""
    return ServeSettings(models=tuple(paths.items()), warm_up=False, max_batch=8, max_beams=8, max_tokens=200)


@pytest.fixture(scope="module")
def models(settings: ServeSettings, enabled: None) -> Models:
    return Models([LocalModel(name, settings) for name, _ in settings.models])


@pytest.fixture(scope="module")
def url(settings: ServeSettings, models: Models) -> Iterator[str]:
    """Its address."""
    with in_thread(create_app(settings, models)) as address:
        yield address


@pytest.fixture
def lookups() -> Callable[[], dict[str, float]]:
    """What was counted of the cache since the beginning of the test."""

    def counts() -> dict[str, float]:
        value = metrics.REGISTRY.get_sample_value
        return {name: value("fastgen_cache_total", {"outcome": name}) or 0 for name in ("hit", "miss", "down")}

    before = counts()
    return lambda: {name: value - before[name] for name, value in counts().items()}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    """OpenAI's client for it."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """A plain one."""
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made
