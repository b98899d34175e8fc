"""The benchmarks of the server: the client, the numbers made of what it sees, the models, and one from end to end."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from benchmarks.serving import models, report, schedulers, service, streams, translation
from benchmarks.serving.__main__ import main
from benchmarks.serving.load import Answer, Load, run
from tests.serve.servers import in_thread


def answered(due: float, latency: float | None, status: int = 200, first: float | None = None) -> Answer:
    return Answer(0, due, None if first is None else due + first, None if latency is None else due + latency, status)


# ---- numbers


def test_percentiles() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [report.percentile(values, percent) for percent in (0, 50, 95, 99, 100)] == [1, 51, 96, 100, 100]
    assert report.percentile([], 50) == report.percentile([float("inf")], 50) == float("inf")


def test_the_beginning_and_the_end_do_not_count() -> None:
    answers = [answered(due / 10, 0.5 if due < 20 else 0.2) for due in range(100)]
    found = report.of(answers, 10.0)
    assert found["asked"] == pytest.approx(10) and found["answered"] == pytest.approx(10, abs=0.5)
    assert found["p50"] == found["p99"] == pytest.approx(0.2) and found["level"]


def test_what_is_refused_has_no_latency_and_what_is_not_answered_has_no_end() -> None:
    answers = [answered(due / 10, 0.1, 429 if due % 2 else 200) for due in range(100)]
    found = report.of(answers, 10.0, warm=0.0)
    assert found["answered"] == pytest.approx(5, abs=0.2) and found["p99"] == pytest.approx(0.1)
    assert found["statuses"] == {200: 50, 429: 50} and not found["level"]
    assert report.of([answered(1.0, None, 0)], 10.0, warm=0.0)["p50"] == float("inf")


def test_latency_that_grows_is_not_level() -> None:
    level = [answered(due / 10, 0.2 + 0.05 * (due % 3)) for due in range(300)]
    grows = [answered(due / 10, 0.2 + due / 500) for due in range(300)]
    assert report.is_level(level, 295) and not report.is_level(grows, 295)
    assert not report.is_level(level, 200) and not report.is_level([], 0)


def test_the_highest_rate_at_a_latency() -> None:
    rows = [{"asked": asked, "p95": p95} for asked, p95 in ((10.0, 0.1), (20.0, 0.2), (30.0, 1.0))]
    assert schedulers.rate_at(rows, 0.6) == pytest.approx(25)
    assert schedulers.rate_at(rows, 5.0) == 30.0 and schedulers.rate_at(rows, 0.05) == 0.0


def test_schedulers_beside_each_other() -> None:
    def measured(scheduler: str, times: float) -> list[dict[str, Any]]:
        common = {"padding": "left out", "scheduler": scheduler}
        closed = {**common, "part": None, "answered": 12 * times}
        rates = ((5 * times, 0.1, True), (10 * times, 0.2, True), (12 * times, 3.0, False))
        return [
            closed,
            *({**common, "part": 1.0, "asked": r, "answered": r, "p95": p, "level": level} for r, p, level in rates),
        ]

    rows = [*measured("none", 1.0), *measured("naive", 2.0), *measured("hungry", 3.0)]
    found = {row["scheduler"]: row for row in schedulers.summarised(rows)}
    assert found["hungry"]["level"] == 30 and found["hungry"]["capacity"] == 36 and found["hungry"]["p95"] == 0.2
    assert found["hungry"]["over_none"] == pytest.approx(3) and found["hungry"]["over_naive"] == pytest.approx(1.5)
    assert found["hungry"]["equal_p95"] == pytest.approx(1.5) and found["naive"]["equal_p95"] == pytest.approx(1)
    assert "| hungry |" in report.shown(list(found.values()), schedulers.SUMMARY)


def test_streams_are_compared_by_their_texts() -> None:
    rows: list[dict[str, Any]] = [
        {"side": "transformers", "tokens": 10.0, "_texts": {0: "a", 1: "b", 2: "c"}},
        {"side": "fastgen", "tokens": 30.0, "_texts": {0: "a", 1: "x"}},
    ]
    streams.compare(rows)
    assert (rows[0]["same"], rows[0]["times"]) == ("1 of 2", 3.0) and "times" not in rows[1]


# ---- the client


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = FastAPI()

    @app.post("/ask")
    async def ask(request: Request) -> JSONResponse:
        number = (await request.json())["number"]
        await asyncio.sleep(0.05)
        if number == 1:
            return JSONResponse({}, 429, {"Retry-After": "3"})
        return JSONResponse({"number": number})

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        async def events() -> Any:
            for text in (None, "a", "", "bc"):
                yield f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"
                await asyncio.sleep(0.05)
            yield 'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    with in_thread(app) as address:
        yield address


BODIES = [{"number": number} for number in range(3)]


def test_requests_that_come_by_themselves(url: str) -> None:
    answers = run(Load(f"{url}/ask", BODIES, 1.0, rate=40.0))
    assert 15 < len(answers) < 70
    assert [answer.body for answer in answers[:4]] == [0, 1, 2, 0]
    assert [answer.due for answer in answers] == sorted(answer.due for answer in answers)
    for answer in answers:
        assert answer.latency >= 0.05 and answer.is_good == (answer.body != 1)
        assert (answer.status, answer.retry_after) == ((429, "3") if answer.body == 1 else (200, None))
        assert answer.body == 1 or answer.content == {"number": answer.body}


def test_clients_that_wait_for_their_answers(url: str) -> None:
    answers = run(Load(f"{url}/ask", BODIES[:1], 0.5, clients=3))
    assert len(answers) >= 6
    at_once = [sum(answer.due <= each.due < (answer.end or 0) for answer in answers) for each in answers]
    assert max(at_once) == 3


def test_streams(url: str) -> None:
    (answer,) = run(Load(f"{url}/stream", [{}], 0.1, streams=True))
    assert answer.content == "abc" and answer.is_good
    assert answer.first is not None and 0.05 <= answer.first - answer.due <= answer.latency - 0.1
    assert report.first_tokens([answer], 0.1, 50, warm=0.0) == pytest.approx(answer.first - answer.due)
    assert report.first_tokens([answer], 0.1, 50, warm=1.0) == float("inf")


def test_a_server_that_is_not_there() -> None:
    answers = run(Load("http://127.0.0.1:9/ask", BODIES, 0.2))
    assert answers and all(answer.status == 0 and not answer.is_good for answer in answers)


# ---- the service that is compared with


def test_a_service_batches_what_comes_within_its_time() -> None:
    batches: list[int] = []

    def translate(texts: Any) -> list[str]:
        batches.append(len(texts))
        return [text.upper() for text in texts]

    async def ask() -> list[str]:
        made = service.Batches(translate, 0.2)
        task = asyncio.create_task(made.run())
        found = await asyncio.gather(*(made.ask(f"a{number}") for number in range(20)))
        task.cancel()
        return list(found)

    assert asyncio.run(ask()) == [f"A{number}" for number in range(20)]
    assert batches == [16, 4]


# ---- models


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 256, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return models.translator(tmp_path_factory.mktemp("translator"), **sizes, **heads)


SENTENCES = sorted(models.sentences(40), key=len)[::12]


def test_translations_end_by_themselves(translator: Path) -> None:
    translate = service.over_transformers(str(translator))
    assert translate(SENTENCES) == [models.translation(text) for text in SENTENCES]
    assert len({len(text.split()) for text in SENTENCES}) > 3


def test_ctranslate2_gives_the_same_translations(translator: Path) -> None:
    pytest.importorskip("ctranslate2")
    translation.convert(translator)
    translate = service.over_ctranslate2(str(translator))
    assert translate(SENTENCES) == [models.translation(text) for text in SENTENCES]


# ---- from end to end


def test_a_benchmark_from_end_to_end(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(schedulers, "CLIENTS", 4)
    narrow = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setattr(models, "bert_base", functools.partial(models.bert_base, **narrow))
    words = ["schedulers", "--only", "hungry", "--padding", "left out", "--parts", "0.3", "--layers", "1"]
    assert main([*words, "--seconds", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "schedulers.json").read_text())
    assert [row["part"] for row in found["rows"]] == [None, 0.3]
    assert all(set(row["statuses"]) == {"200"} and row["answered"] > 0 for row in found["rows"])
    assert "| hungry |" in (tmp_path / "schedulers.md").read_text()
    assert (tmp_path / "schedulers-left-out.png").read_bytes().startswith(b"\x89PNG")
