"""How much a server takes, of a request and of requests; and what it does when a client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from fastgen_serve import guard, limits
from fastgen_serve.api.libretranslate import TranslateRequest as Translation
from fastgen_serve.api.openai_schema import ChatRequest, EmbeddingRequest
from fastgen_serve.api.responses_schema import ResponseRequest
from fastgen_serve.api.vllm_schema import DetokenizeRequest, TokenizeRequest
from fastgen_serve.app import create_app
from fastgen_serve.concurrency import ClosedStream
from fastgen_serve.errors import BadRequest, Busy, Failed
from fastgen_serve.jobs import Generate, ModelInfo
from fastgen_serve.limits import Admission
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from tests.serve.servers import Clock, connected, in_thread, until

SETTINGS = ServeSettings(max_body_bytes=1000, api_keys=("key",))
KEY = {"Authorization": "Bearer key"}
USER = {"role": "user", "content": "a"}


# ---- requests


def refused(admission: Admission) -> int | None:
    """Returns the seconds after which a refused client is told to come again."""
    with pytest.raises(Busy) as error:
        admission.enter()
    return error.value.retry_after


def replaced(admission: Admission, clock: Clock, *seconds: float) -> None:
    """Has a request leave and another one enter, each time after so many seconds."""
    for each in seconds:
        clock.now += each
        admission.leave()
        admission.enter()


def test_so_many_wait_and_no_more() -> None:
    admission = Admission(slots=4, most=2)
    for _ in range(6):
        admission.enter()
    assert admission.waiting == 2 and refused(admission) == 1, "nothing is known yet"
    admission.leave()
    admission.enter()


def test_who_finds_nobody_runs_whatever_it_asks_for() -> None:
    admission = Admission(slots=4, most=0)
    admission.enter(100)
    refused(admission)
    admission.leave(100)
    admission.enter(4)


def test_a_client_is_told_when_to_come_again_by_how_fast_others_leave() -> None:
    clock = Clock()
    admission = Admission(slots=1, most=10, now=clock)
    admission.enter(11)
    replaced(admission, clock, *[2.0] * 10)
    assert refused(admission) == 22  # eleven that wait


def test_how_fast_it_goes_is_what_it_is_when_all_slots_are_taken() -> None:
    clock = Clock()
    admission = Admission(slots=2, most=10, budget=5.0, now=clock)
    for _ in range(5):
        admission.enter()
    for _ in range(3):
        clock.now += 1
        admission.leave()
    assert admission.wait() == 1.0
    admission.leave(2)
    for _ in range(5):  # hours in which hardly anything is asked
        clock.now += 3600
        admission.enter()
        clock.now += 60
        admission.leave()
    for _ in range(6):
        admission.enter()
    assert admission.waiting == 4 and admission.wait() == 2.5


def test_who_is_prepared_waits_and_says_nothing_of_how_fast_others_leave() -> None:
    clock = Clock()
    admission = Admission(slots=1, most=1, now=clock)
    for _ in range(3):
        with admission.reserve(2):
            assert admission.rows == 2
            refused(admission)
            clock.now += 1
    assert (admission.rows, admission.wait()) == (0, None)


def test_with_a_budget_nobody_waits_who_would_not_be_answered_in_time() -> None:
    clock = Clock()
    admission = Admission(slots=1, most=100, budget=6.0, now=clock)
    admission.enter(2)
    replaced(admission, clock, *[1.0] * 10)
    for _ in range(4):
        admission.enter()
    refused(admission)  # the one that runs, and five after it, are answered in six seconds


def test_a_budget_refuses_nobody_for_whom_there_are_slots() -> None:
    clock = Clock()
    admission = Admission(slots=4, most=100, budget=3.0, now=clock)
    admission.enter(4)
    replaced(admission, clock, *[1.0] * 4)  # whoever runs beside three others takes four
    assert refused(admission) == 1
    admission.leave()
    admission.enter()


def test_a_budget_without_slots() -> None:
    """An encoder is busy with one request, however many slots generation has. Its batches say how fast it goes, and
    not the clock: requests may wait for others, while it does nothing.
    """
    clock = Clock()
    admission = Admission(slots=64, most=100, budget=3.0, now=clock)
    admission.batch_all()
    admission.enter(4)
    for _ in range(4):  # two a second
        admission.note(0.5)
        replaced(admission, clock, 20)
    admission.enter(2)
    assert refused(admission) == 3


def test_a_request_asks_for_no_more_than_there_is() -> None:
    settings, info = ServeSettings(max_tokens=100, max_beams=8, slots=4), ModelInfo("m", "decoder-only", (), None)
    job = Generate((1,), {"max_new_tokens": 100, "num_beams": 4})
    assert limits.bounded(job, info, settings) is job
    for options, param in (
        ({"max_new_tokens": 101}, "max_new_tokens"),
        ({"num_beams": 5}, "num_beams"),
        ({"num_return_sequences": 9}, "num_return_sequences"),
    ):
        with pytest.raises(BadRequest) as refused:
            limits.bounded(Generate((1,), options), info, settings)
        assert refused.value.param == param


def test_what_a_model_sets_is_no_more_than_the_server_gives() -> None:
    settings = ServeSettings(max_tokens=100, max_beams=4)
    kinds = {
        "target": ModelInfo("m", "encoder-decoder", (), None, max_new_tokens=200, defaults={"max_length": 201}),
        "new": ModelInfo("m", "decoder-only", (), None, max_new_tokens=101, defaults={"max_new_tokens": 101}),
        "whole": ModelInfo("m", "decoder-only", (), None, max_new_tokens=101, defaults={"max_length": 101}),
        "beams": ModelInfo("m", "encoder-decoder", (), None, max_new_tokens=20, defaults={"num_beams": 5}),
    }
    job = Generate((1, 2), {"do_sample": True})
    for name in ("target", "new"):
        assert limits.bounded(job, kinds[name], settings).options == {"do_sample": True, "max_new_tokens": 100}
    assert limits.bounded(job, kinds["whole"], settings) is job  # of which two are the prompt's
    with pytest.raises(BadRequest, match="num_beams is 5"):
        limits.bounded(job, kinds["beams"], settings)
    fewer = Generate((1,), {"num_beams": 4})
    assert limits.bounded(fewer, kinds["beams"], settings) is fewer


# ---- a request


class Probe:
    """An application with a path that waits until its task is cancelled."""

    def __init__(self) -> None:
        self.began, self.cancelled = 0, 0
        self.app: FastAPI = create_app(SETTINGS, Models([]))
        self.app.add_api_route("/echo", self.echo, methods=["POST"])
        self.app.add_api_route("/wait", self.wait, methods=["POST"])
        self.app.add_api_route("/fail", self.fail, methods=["POST"])
        self.app.add_api_route("/flood", self.flood, methods=["POST"], response_class=ClosedStream)

    async def echo(self, request: Request) -> dict[str, int]:
        return {"size": len(await request.body())}

    async def wait(self, request: Request) -> None:
        await request.body()
        self.began += 1
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def flood(self) -> ClosedStream:
        async def parts() -> AsyncIterator[bytes]:
            try:
                self.began += 1
                while True:
                    yield b"x" * 2**20
                    await asyncio.sleep(0)
            finally:
                self.cancelled += 1

        return ClosedStream(parts())

    async def fail(self, kind: str) -> None:
        raise Failed("on purpose") if kind == "known" else RuntimeError("a secret")


@pytest.fixture(scope="module")
def probe() -> Probe:
    return Probe()


@pytest.fixture(scope="module")
def url(probe: Probe) -> Iterator[str]:
    with in_thread(probe.app) as address:
        yield address


def in_parts(count: int) -> Iterator[bytes]:
    """A body whose length nobody declares."""
    for _ in range(count):
        yield b"x" * 100


def test_a_body_is_as_large_as_it_may_be_and_no_larger(url: str) -> None:
    assert httpx.post(f"{url}/echo", content=b"x" * 1000).json() == {"size": 1000}
    assert httpx.post(f"{url}/echo", content=in_parts(10)).json() == {"size": 1000}
    for body in (b"x" * 1001, in_parts(11)):
        refused = httpx.post(f"{url}/echo", content=body)
        assert refused.status_code == 413 and "1000 bytes" in refused.text


def test_a_large_body_is_refused_before_it_comes(url: str) -> None:
    with connected(url) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_ends_what_runs_for_it(url: str, probe: Probe) -> None:
    before = probe.began, probe.cancelled
    with connected(url) as client:
        client.sendall(b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        until(lambda: probe.began == before[0] + 1)
        assert probe.cancelled == before[1]
    until(lambda: probe.cancelled == before[1] + 1)
    until(lambda: probe.app.state.traffic.running == 0)


@pytest.fixture
def short(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have no time beyond what they may take, which is little."""
    monkeypatch.setattr(guard, "_GRACE", 0.0)
    monkeypatch.setitem(vars(SETTINGS), "request_timeout_s", 0.1)


@pytest.mark.usefixtures("short")
def test_a_body_that_never_comes_is_not_waited_for(url: str, probe: Probe) -> None:
    with connected(url) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 504")
    assert httpx.post(f"{url}/wait", content=b"{}").json()["error"]["message"] == "the request took longer than 0.1 s"


@pytest.mark.usefixtures("short")
def test_a_client_that_does_not_read_its_response_holds_nothing(url: str, probe: Probe) -> None:
    before = probe.cancelled
    with connected(url) as client:
        client.sendall(b"POST /flood HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        until(lambda: probe.cancelled == before + 1)
        until(lambda: probe.app.state.traffic.running == 0)


def test_keys_are_asked_for_where_they_are_needed(url: str) -> None:
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 200
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic key"}):
        refused = httpx.get(f"{url}/metrics", headers=headers)
        assert refused.status_code == 401 and "key" in refused.json()["error"]
    assert httpx.get(f"{url}/metrics", headers=KEY).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/", "/page.js", "/unknown", "/echo"])
async def test_a_probe_may_ask_for_the_head_alone(path: str, url: str, probe: Probe) -> None:
    """As load balancers do: there is no body, whichever server runs the application."""
    transport = httpx.ASGITransport(probe.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=KEY) as client:
        whole, head = await client.get(path), await client.head(path)
    for each in (head, httpx.head(f"{url}{path}", headers=KEY)):
        assert (each.status_code, each.content) == (whole.status_code, b"")
        assert each.headers["content-type"] == whole.headers["content-type"]
    assert path == "/metrics" or head.headers["content-length"] == str(len(whole.content))


def test_a_request_has_an_id_and_a_line_in_the_log_without_its_text(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastgen_serve.requests")
    assert httpx.get(f"{url}/health", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    made = httpx.get(f"{url}/health", headers={"X-Request-Id": 'not "one"'}).headers["X-Request-Id"]
    assert len(made) == 32
    httpx.get(f"{url}/health?text=private", headers={"X-Request-Id": "mine-2"})
    httpx.get(f"{url}/private", headers={"X-Request-Id": "mine-3"})
    until(lambda: len(caplog.records) == 4)  # a line is written after its answer
    lines: list[dict[str, Any]] = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["id"] for line in lines] == ["mine-1", made, "mine-2", "mine-3"]
    assert [(line["path"], line["status"]) for line in lines[2:]] == [("/health", 200), ("unknown", 404)]
    assert all(line["ms"] >= 0 for line in lines) and "private" not in caplog.text


def test_what_fails_says_so_and_not_why(url: str) -> None:
    known = httpx.post(f"{url}/fail?kind=known")
    assert known.status_code == 500 and "on purpose" in known.text
    unknown = httpx.post(f"{url}/fail?kind=unknown")
    assert unknown.status_code == 500 and "secret" not in unknown.text
    assert len(unknown.headers["X-Request-Id"]) == 32
    assert httpx.post(f"{url}/fail").status_code == 400  # a field is missing
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.get(f"{url}/echo").status_code == 405
    assert httpx.get(f"{url}/health").status_code == 200


def test_pages_of_other_sites_ask_where_they_may() -> None:
    site, other = "https://example.org", "https://example.com"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def ask(*origins: str) -> list[tuple[int, str | None]]:
        app = create_app(ServeSettings(api_keys=("key",), cors_origins=origins), Models([]))
        found = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for origin in (site, other):
                answers = [
                    await client.options("/v1/completions", headers={"Origin": origin, **preflight}),
                    await client.post("/v1/completions", headers={"Origin": origin}, json={}),  # which has no key
                ]
                found += [(each.status_code, each.headers.get("Access-Control-Allow-Origin")) for each in answers]
        return found

    assert asyncio.run(ask()) == [(401, None)] * 4
    assert asyncio.run(ask("http://localhost:3000", site)) == [(200, site), (401, site), (400, None), (401, None)]
    assert asyncio.run(ask("*")) == [(200, "*"), (401, "*")] * 2


def test_a_server_that_stops_takes_no_requests(url: str, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.app.state.traffic, "is_draining", True)
    refused = httpx.post(f"{url}/echo", content=b"{}")
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 503
    monkeypatch.undo()
    assert httpx.post(f"{url}/echo", content=b"{}").status_code == 200


WRONG = 20_000
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ResponseRequest, {"input": [0] * WRONG}),
    (ResponseRequest, {"input": [{}] * WRONG}),
    (ResponseRequest, {"input": [{"role": "user", "content": [{}] * WRONG}]}),
    (ResponseRequest, {"input": "a", "include": ["b"] * WRONG}),
    (ResponseRequest, {"input": "a", "metadata": {f"{each}": 0 for each in range(WRONG)}}),
    (ChatRequest, {"messages": [0] * WRONG}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * WRONG}]}),
    (ChatRequest, {"messages": [USER], "stop": [0] * WRONG}),
    (ChatRequest, {"messages": [USER], "stop_token_ids": ["a"] * WRONG}),
    (ChatRequest, {"messages": [USER], "chat_template_kwargs": {f"{each}": [] for each in range(WRONG)}}),
    (ChatRequest, {"messages": [USER], **{f"{each}": 0 for each in range(WRONG)}}),
    (ChatRequest, {"messages": [{**USER, **{f"{each}": 0 for each in range(WRONG)}}]}),
    (EmbeddingRequest, {"input": [None] * WRONG}),
    (TokenizeRequest, {"messages": [0] * WRONG}),
    (DetokenizeRequest, {"tokens": ["a"] * WRONG}),
    (Translation, {"q": [0] * WRONG, "source": "en", "target": "de"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=range(len(BODIES)))
def test_the_first_mistake_of_many_is_enough(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """What is wrong with each of a million would take minutes, in which the server answers nobody, and gigabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(body)
        assert len(refused.value.errors(include_url=False)) <= 5
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_texts_are_characters() -> None:
    for body in ({"input": "\ud800"}, {"input": "a", "metadata": {"\ud800": "b"}}):
        with pytest.raises(ValidationError, match="half of a surrogate pair"):
            ResponseRequest.model_validate(body)


async def test_a_body_stays_with_the_client_until_it_is_wanted() -> None:
    """Beyond a few parts. The body of a refused request is read to its end before the response: a connection that is
    closed with bytes unread is reset, and the response may be lost.
    """
    left, seen = [b"a" * 10] * 30, list[int]()

    async def receive() -> dict[str, Any]:
        left.pop()
        return {"type": "http.request", "body": b"a" * 10, "more_body": bool(left)}

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        seen.append(len(left))
        await receive()
        await asyncio.sleep(0.05)
        seen.append(len(left))
        raise Busy("enough")

    async def send(message: Any) -> None:
        seen.append(len(left))

    refuse = lambda path, error: JSONResponse({}, error.status)  # noqa: E731
    made = guard.Guard(wait, ServeSettings(), str, lambda path: False, lambda path: 1000, refuse, guard.Traffic())
    await made({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
    assert seen == [25, 24, 0, 0], "four wait, and one that there was no room for"
