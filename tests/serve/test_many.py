"""`fastgen-serve` with two models, as a process: what it says, and requests from many clients, until it is stopped.

Some clients leave, some requests are malformed, a model's process is killed: all others are right. `make test` runs
some requests, `make test-long` thousands, and the loop that watches the memory.
"""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.equivalence.check import in_threads
from tests.serve import servers
from tests.serve.checkpoints import texts
from tests.serve.servers import BART, GPT2, LONG, SHORT, WAIT, Command, ask, command, running, until

CLIENTS = 32
FOLDERS = {"kjv-gpt2": GPT2, "kjv-bart": BART}
PROMPTS = ["the", "and it came to pass in those days that"]
# Fields of a request, and the options of `generate` that they are.
KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0, "num_beams": 1}, {"num_beams": 1}),
    ({"num_beams": 3}, {"num_beams": 3}),
    ({"n": 2, "num_beams": 4, "length_penalty": 2.0},
     {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0}),
    ({"temperature": 0, "num_beams": 1, "repetition_penalty": 1.3}, {"num_beams": 1, "repetition_penalty": 1.3}),
    ({"temperature": 0.9, "top_k": 30, "seed": 5},
     {"num_beams": 1, "do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 1.0, "seed": 5}),
]  # fmt: skip
TOKENS = 12


@cache
def expected(model: str, prompt: int, kind: int) -> list[str]:
    return texts(FOLDERS[model], PROMPTS[prompt], max_new_tokens=TOKENS, **KINDS[kind][1])


@pytest.fixture(scope="module")
def known(enabled: None) -> None:
    """What is expected, before there are threads: they share torch's generator."""
    for model in FOLDERS:
        for prompt in range(len(PROMPTS)):
            for kind in range(len(KINDS)):
                expected(model, prompt, kind)


@pytest.fixture(scope="module")
def served(enabled: None) -> Iterator[Command]:
    with command(*FOLDERS.values(), "--slots", "32", "--max-waiting", "64", "--no-warm-up") as made:
        made.wait_until_ready()
        yield made


def process_of(server: Command, name: str) -> int:
    """The process of a model: that of the two which decodes when it is asked to."""
    every = psutil.Process(server.process.pid).children()
    children = [each for each in every if "spawn_main" in " ".join(each.cmdline())]
    assert len(children) == len(FOLDERS), "each model has a process of its own"
    before = {child.pid: sum(child.cpu_times()[:2]) for child in children}
    ask(server, model=name, **LONG)
    return max(children, key=lambda child: sum(child.cpu_times()[:2]) - before[child.pid]).pid


def test_it_says_where_it_is_and_how_its_models_are_loaded(served: Command) -> None:
    said = "\n".join(served.lines)
    assert re.search(r"^fastgen-serve: http://127\.0\.0\.1:\d+ \(models are loading\)$", said, re.M)
    for name in ("kjv-gpt2", "kjv-bart"):
        assert re.search(rf"^fastgen-serve: {name}: ready", said, re.M)
    assert "Traceback" not in said and "Warning" not in said


def test_a_client_that_leaves_leaves_no_slot(served: Command) -> None:
    """Whether its request runs or waits, and streams or not."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    clients = [servers.connected(served.url) for _ in range(40)]
    for number, client in enumerate(clients):
        body = json.dumps({**LONG, "model": "kjv-gpt2", "stream": bool(number % 2)})
        client.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
    until(lambda: running(served) == 40)
    for client in clients:
        client.close()
    until(lambda: running(served) == 0)
    until(lambda: 'fastgen_engine_busy{model="kjv-gpt2"} 0.0' in httpx.get(f"{served.url}/metrics").text)
    assert ask(served, **SHORT).status_code == 200


def test_headers_without_end_are_refused(served: Command) -> None:
    """No key, no body and no queue is looked at before they are complete."""
    with servers.connected(served.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nX-Long: ")
        with pytest.raises(OSError):
            for _ in range(200):
                client.sendall(b"a" * 2**17)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 600}).encode()
    pieces = (body[at : at + 1] for at in range(len(body)))  # each has some bytes around it
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/completions", content=pieces, headers=headers, timeout=WAIT)
    assert answer.status_code == 200, answer.text


def malformed(url: str, count: int) -> list[Any]:
    """Bodies that the documentation does not allow."""
    operation, found = schemathesis.openapi.from_url(f"{url}/openapi.json")["/v1/completions"]["POST"], list[Any]()

    @settings(
        max_examples=count, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def draw(case: Any) -> None:
        found.append(case.as_transport_kwargs())

    draw()
    return found


class Load:
    """Requests of clients that take turns."""

    def __init__(self, url: str, count: int, bad: list[Any], kill: Any = None) -> None:
        self.url, self.count, self.bad, self._kill = url, count, bad, kill
        self.statuses, self.wrong = Counter[tuple[str, int]](), list[Any]()
        self._left, self._lock = iter(range(count)), threading.Lock()

    def run(self) -> None:
        in_threads(self._client, CLIENTS)

    def _client(self, _: int) -> None:
        with httpx.Client(timeout=WAIT) as client:
            while True:
                with self._lock:
                    number = next(self._left, None)
                if number is None:
                    return
                try:
                    if number == self.count // 2 and self._kill is not None:
                        self._kill()
                    self._ask(client, random.Random(number))
                except Exception as error:
                    self.wrong.append((number, error))

    def _ask(self, client: httpx.Client, draw: random.Random) -> None:
        fate = draw.choices(["", "leaves", "malformed"], [85, 10, 5])[0] if self.bad else ""
        if fate == "malformed":
            self._note(fate, client.request(**{"method": "POST", **draw.choice(self.bad)}).status_code)
            return
        model, prompt, kind = draw.choice(list(FOLDERS)), draw.randrange(len(PROMPTS)), draw.randrange(len(KINDS))
        body = {"model": model, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, **KINDS[kind][0]}
        if fate == "leaves":
            with client.stream("POST", f"{self.url}/v1/completions", json={**body, "stream": True}) as answer:
                next(answer.iter_lines(), None)
            self._note(fate, answer.status_code)
            return
        while True:
            answer = client.post(f"{self.url}/v1/completions", json=body)
            self._note(fate, answer.status_code)
            if answer.status_code not in (429, 503):
                break
            assert int(answer.headers["Retry-After"]) >= 1
        assert answer.status_code == 200, (body, answer.text)
        found = [choice["text"] for choice in answer.json()["choices"]]
        if found != expected(model, prompt, kind):
            self.wrong.append((body, found))

    def _note(self, fate: str, status: int) -> None:
        with self._lock:
            self.statuses[fate, status] += 1


def busy(url: str) -> float:
    """Slots that are taken, and requests that wait or run."""
    text = httpx.get(f"{url}/metrics", timeout=WAIT).text
    found = re.findall(r"^fastgen_(engine_busy|in_flight)\{.*\} (\S+)", text, re.M)
    assert sum(name == "engine_busy" for name, _ in found) == len(FOLDERS), "each engine answers"
    return sum(float(value) for _, value in found)


@pytest.mark.long
@pytest.mark.usefixtures("known")
def test_mixed_requests_get_what_generate_gives(served: Command) -> None:
    load = Load(served.url, 500, [])
    load.run()
    assert not load.wrong, load.wrong[:3]
    assert load.statuses["", 200] == 500
    assert {status for _, status in load.statuses} <= {200, 429}


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_faults_stay_where_they_are(served: Command, count: int) -> None:
    """Clients that leave, malformed requests, and the death of a model's process, which is started again."""
    victim = psutil.Process(process_of(served, "kjv-gpt2"))
    bad = malformed(served.url, max(count // 20, 20))

    def kill() -> None:
        victim.send_signal(signal.SIGKILL)
        until(lambda: httpx.get(f"{served.url}/ready", timeout=WAIT).status_code == 503)
        refused = ask(served, model="kjv-gpt2", **SHORT)
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        until(lambda: ask(served, model="kjv-bart", **SHORT).status_code == 200)  # the other model goes on

    load = Load(served.url, count, bad, kill)
    load.run()
    assert not load.wrong
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    assert not {status for _, status in load.statuses} & {500, 502}, load.statuses
    answered = sum(n for (fate, status), n in load.statuses.items() if status not in (429, 503) or fate == "malformed")
    assert load.statuses["", 200] > count // 2 and answered > count * 0.8
    assert {status for fate, status in load.statuses if fate == "malformed"} <= {400, 404, 413, 415, 422}
    until(lambda: httpx.get(f"{served.url}/ready").status_code == 200)
    until(lambda: busy(served.url) == 0)
    assert "Traceback" not in "\n".join(served.lines)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("known")
def test_memory_does_not_grow() -> None:
    """A loop of 20,000 requests: what the first 2,000 take is all, but for steps of further numbers of requests, which
    by chance meet later. From the 10,000th on there are none.
    """
    with command(*FOLDERS.values(), "--slots", "32", "--no-warm-up") as server:
        server.wait_until_ready()
        main = psutil.Process(server.process.pid)

        def resident() -> int:
            time.sleep(5)  # the processes free unused memory after a second without a job
            return sum(each.memory_info().rss for each in (main, *main.children(recursive=True)))

        Load(server.url, 2_000, []).run()
        before = resident()
        sizes = []
        for _ in range(9):
            load = Load(server.url, 2_000, [])
            load.run()
            assert not load.wrong
            sizes.append(resident())
        in_mib = f"{before >> 20} MiB, then {[size >> 20 for size in sizes]}"
        print(in_mib)
        assert max(sizes[4:]) < max(sizes[:4]) + 2**23, in_mib
        assert max(sizes) < before + 2**26, in_mib


def test_a_server_that_is_told_to_stop_finishes_what_runs(served: Command) -> None:
    """The last test of this server."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    answers = servers.in_background(3, served, **LONG)
    until(lambda: running(served) == 3)
    served.process.send_signal(signal.SIGTERM)
    until(lambda: any("stopping" in line for line in served.lines))
    try:
        late = ask(served, **SHORT)
        assert late.status_code == 503 and "Retry-After" in late.headers
    except httpx.TransportError:  # it has stopped already
        assert served.wait() == 0
    assert [answer.result(WAIT).json()["usage"]["completion_tokens"] for answer in answers] == [400] * 3
    assert served.wait() == 0
    assert not psutil.wait_procs(children, WAIT)[1]
    assert "Traceback" not in "\n".join(served.lines)
