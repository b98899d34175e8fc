"""What a server counts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastgen_serve import log, metrics
from fastgen_serve.app import create_app
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import Generate
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from tests.serve.servers import GPT2, in_thread

SETTINGS = ServeSettings(models=(("counted", GPT2),), slots=8)


@pytest.fixture(scope="module")
def model(enabled: None) -> LocalModel:
    return LocalModel("counted", SETTINGS)


@pytest.fixture(scope="module", autouse=True)
def url(model: LocalModel) -> Iterator[str]:
    with in_thread(create_app(SETTINGS, Models([model]))) as address:  # which stops the model at the end
        yield address


def samples(url: str) -> dict[tuple[str, ...], float]:
    """What /metrics says, by name and sorted values of labels."""
    found = httpx.get(f"{url}/metrics")
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(found.text)
    return {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}


async def test_what_is_done_is_counted(model: LocalModel, url: str) -> None:
    job = Generate((5, 6, 7), {"num_beams": 1, "max_new_tokens": 6, "min_new_tokens": 6}, streams=True)
    before = samples(url)
    async for _ in model.stream_all([job]):
        pass
    with pytest.raises(BadRequest):
        await model.generate(Generate((-1,)))
    after = samples(url)

    def more(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more("fastgen_tokens_total", "counted", "generated") == 6
    assert more("fastgen_tokens_total", "counted", "prompt") == 4
    assert more("fastgen_jobs_total", "counted", "finished") == 1
    assert more("fastgen_jobs_total", "counted", "failed") == 1
    assert more("fastgen_time_to_first_token_seconds_count", "counted") == 1
    assert more("fastgen_time_per_token_seconds_count", "counted") == 1
    assert more("fastgen_requests_total", "/metrics", "200") == 1
    assert more("fastgen_engine_steps_total", "counted") >= 5
    assert after["fastgen_engine_slots", "counted"] == 8
    assert after["fastgen_engine_memory_bytes", "counted"] > 2**24
    assert after["fastgen_in_flight", "counted"] == after["fastgen_waiting", "counted"] == 0


@pytest.mark.parametrize("log_texts", [False, True])
async def test_texts_are_logged_only_if_asked_for(
    model: LocalModel, log_texts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_settings", dataclasses.replace(SETTINGS, log_texts=log_texts))
    tokens = tuple(model.tokenizer("fear not").input_ids)
    job = Generate(tokens, {"num_beams": 1, "max_new_tokens": 3, "min_new_tokens": 3})
    entry = log.Entry("id", "POST", "/path")
    log.current.set(entry)
    await asyncio.gather(model.generate(job), model.generate(job))
    texts = {"texts": [model.tokenizer.decode(tokens)] * 2} if log_texts else {}
    assert entry.more == {"model": "counted", "prompt_tokens": 2 * len(tokens), "tokens": 6, **texts}


def test_reasons_are_told_up_to_their_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"the model failed: one thing": 2, "the model failed: another": 3, "hooks": 1}
    latest = {"m": {"fastgen": {"generate": {"fallback": reasons}}, "alone": reasons}}
    monkeypatch.setattr(metrics.ENGINES, "latest", latest)
    lines = metrics.text().decode().splitlines()
    assert 'fastgen_fallbacks_total{entry="generate",model="m",reason="the model failed"} 5.0' in lines
    assert 'fastgen_alone_total{model="m",reason="the model failed"} 5.0' in lines
    assert 'fastgen_alone_total{model="m",reason="hooks"} 1.0' in lines


def test_sizes_of_batches_are_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.ENGINES, "latest", {"bert": {"batch_sizes": {1: 3, 5: 2, 300: 1}}})
    families = text_string_to_metric_families(metrics.text().decode())
    found = {
        (each.name, each.labels.get("le")): each.value for family in families for each in family.samples
        if each.labels.get("model") == "bert"
    }  # fmt: skip
    buckets = {bound: found["fastgen_batch_size_bucket", bound] for bound in ("1.0", "4.0", "8.0", "256.0", "+Inf")}
    assert buckets == {"1.0": 3, "4.0": 3, "8.0": 5, "256.0": 5, "+Inf": 6}
    assert found["fastgen_batch_size_sum", None] == 313 and found["fastgen_batch_size_count", None] == 6
