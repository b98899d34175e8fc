"""`fastgen-serve` as a process: what it says, what it does on signals, and when the process of its model dies."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fastgen_serve.app import create_app
from fastgen_serve.main import listen, main
from fastgen_serve.models import Models
from fastgen_serve.server import Server
from fastgen_serve.settings import ServeSettings
from tests.serve.servers import BART, GPT2, WAIT, Command, command, connected, damaged, until

LONG = {"prompt": "in the beginning", "max_tokens": 400, "min_tokens": 400, "num_beams": 1, "temperature": 0}
SHORT = {"prompt": "in the beginning", "max_tokens": 5, "num_beams": 1, "temperature": 0}


@pytest.fixture(scope="module")
def served(enabled: None) -> Iterator[Command]:
    with command(GPT2, f"translator={BART}", "--slots", "8", "--max-waiting", "4", "--no-warm-up") as made:
        made.wait_until_ready()
        yield made


def ask(server: Command, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT)


def in_background(count: int, server: Command, **body: Any) -> tuple[list[threading.Thread], list[Any]]:
    """Requests that run meanwhile, and the list that their answers, or errors, come to."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask(server, **body))
        except httpx.HTTPError as error:
            answers.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def running(server: Command) -> int:
    """Sequences that wait or run."""
    found = re.findall(r"^fastgen_in_flight\{.*\} (\d+)", httpx.get(f"{server.url}/metrics", timeout=WAIT).text, re.M)
    return sum(map(int, found))


def test_the_body_of_an_answer_does_not_wait_for_the_client() -> None:
    with listen(ServeSettings(port=0)) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_says_where_it_is_and_how_its_models_are_loaded(served: Command) -> None:
    said = "\n".join(served.lines)
    assert re.search(r"^fastgen-serve: http://127\.0\.0\.1:\d+ \(models are loading\)$", said, re.M)
    for name in ("kjv-gpt2", "translator"):
        assert re.search(rf"^fastgen-serve: {name}: ready", said, re.M)
    assert "Traceback" not in said and "Warning" not in said


def test_models_have_processes_of_their_own(served: Command) -> None:
    assert len(processes_of_models(served)) == 2
    for name in ("kjv-gpt2", "translator"):
        answer = ask(served, model=name, **SHORT)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


def test_each_request_has_a_line_of_json(served: Command) -> None:
    answer = ask(served, **SHORT)
    until(lambda: any(answer.headers["x-request-id"] in line for line in served.lines))
    line = json.loads(next(line for line in served.lines if answer.headers["x-request-id"] in line))
    assert line["path"] == "/v1/completions" and line["status"] == 200 and line["model"] == "kjv-gpt2"
    assert line["tokens"] == 5 and line["prompt_tokens"] > 0 and line["ms"] > 0
    assert SHORT["prompt"] not in "\n".join(served.lines)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_no_slot(served: Command, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    clients = [connected(served.url) for _ in range(12)]
    for client in clients:
        client.sendall(f"{head}\r\n\r\n".encode() + body)
    until(lambda: running(served) == 12)
    for client in clients:
        client.close()
    until(lambda: running(served) == 0)
    until(lambda: 'fastgen_engine_busy{model="kjv-gpt2"} 0.0' in httpx.get(f"{served.url}/metrics").text)
    assert ask(served, **SHORT).status_code == 200


def test_a_process_of_a_model_that_is_killed_is_started_again(served: Command) -> None:
    expected = ask(served, **LONG).json()["choices"][0]["text"]
    victim = psutil.Process(process_of(served, "kjv-gpt2"))
    threads, answers = in_background(4, served, **LONG)
    until(lambda: running(served) == 4)
    victim.send_signal(signal.SIGKILL)
    until(lambda: httpx.get(f"{served.url}/ready").status_code == 503)
    refused = ask(served, **SHORT)
    assert refused.status_code == 503 and "Retry-After" in refused.headers
    assert ask(served, model="translator", **SHORT).status_code == 200  # the other model goes on
    for thread in threads:
        thread.join(WAIT)
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected] * 4


def processes_of_models(server: Command) -> list[psutil.Process]:
    return [each for each in psutil.Process(server.process.pid).children() if "spawn_main" in " ".join(each.cmdline())]


def process_of(server: Command, name: str) -> int:
    """The process of a model: that of the two which decodes when it is asked to."""
    children = processes_of_models(server)
    before = {child.pid: sum(child.cpu_times()[:2]) for child in children}
    ask(server, model=name, **LONG)
    return max(children, key=lambda child: sum(child.cpu_times()[:2]) - before[child.pid]).pid


# A thread of the server that tokenises a long text does not come to its end.
STUCK = """
import sys, time
from fastgen_serve.api import prompts
tokens_of = prompts.tokens_of

def planted(model, text, *more, **options):
    if len(text) > 10_000:
        print("it is stuck", file=sys.stderr, flush=True)
        time.sleep(3600)
    return tokens_of(model, text, *more, **options)

prompts.tokens_of = planted
"""


def test_what_takes_longer_than_it_may_is_refused_at_the_end() -> None:
    with command(GPT2, "--drain-s", "0", "--slots", "1", "--no-warm-up", planted=STUCK) as server:
        server.wait_until_ready()
        threads, answers = in_background(8, server, **LONG)
        until(lambda: running(server) == 8)
        children = psutil.Process(server.process.pid).children(recursive=True)
        tokenising, answered = in_background(1, server, prompt="in the beginning " * 1000)
        until(lambda: "it is stuck" in server.lines)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        for thread in (*threads, *tokenising):
            thread.join(WAIT)
        statuses = [answer.status_code for answer in answers]
        assert 503 in statuses and {*statuses} <= {200, 503} and answered[0].status_code == 503
        assert "Traceback" not in "\n".join(server.lines)
        assert not psutil.wait_procs(children, WAIT)[1]


async def test_a_second_signal_ends_a_server_at_once() -> None:
    settings = ServeSettings()
    server = Server(create_app(settings, Models([])), settings)
    server.handle_exit(signal.SIGINT, None)
    assert not server.should_exit
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and server.force_exit


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path, programs: Path) -> None:
    with command(f"broken={damaged(tmp_path)}", python=programs / "python") as server:
        assert server.wait() == 2
    [reason] = [line for line in server.lines if "cannot be loaded" in line]
    assert str(tmp_path) in reason and "Traceback" not in "\n".join(server.lines)


@pytest.mark.parametrize("package", ["transformers", "fastapi", "py3langid"])
def test_without_its_packages_it_says_what_to_install(package: str) -> None:
    """The command is there with every installation of FastGen."""
    with command(GPT2, planted=f"import sys\nsys.modules[{package!r}] = None") as server:
        assert server.wait() == 2
    (line,) = server.lines
    assert f"needs the package {package}, " in line and "pip install 'fastgen-transformers[transformers,serve]'" in line


def test_no_such_folder_and_no_such_port_are_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/model", "--port", "0"]) == 2
    assert "/no/such/model: no such directory" in capsys.readouterr().err.splitlines()[-1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([GPT2, "--port", str(taken.getsockname()[1])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot listen at 127.0.0.1" in line


# Says when the server begins to import what it serves with, which then does not end.
_LONG_IMPORT = """
import sys, time
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "fastgen_serve.app":
            print("importing", file=sys.stderr, flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Finder)
"""


def test_without_a_folder_for_temporary_files_it_says_so_before_anything_is_loaded() -> None:
    """As in a container whose root is read-only."""
    nowhere = "import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/no/such/folder']"
    with command(GPT2, planted=f"{_LONG_IMPORT}\n{nowhere}") as server:
        until(lambda: server.lines)
        assert "No usable temporary directory" in server.lines[0]
        assert server.wait() == 2


def test_a_server_that_is_told_to_stop_before_it_serves_ends_at_once() -> None:
    """As the first process of a container it would otherwise not notice."""
    with command(GPT2, planted=_LONG_IMPORT) as server:
        until(lambda: "importing" in server.lines)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert server.lines == ["importing"]


def test_headers_without_end_are_refused(served: Command) -> None:
    """No key, no body and no queue is looked at before they are complete."""
    with connected(served.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nX-Long: ")
        with pytest.raises(OSError):
            for _ in range(200):
                client.sendall(b"a" * 2**17)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 600}).encode()
    pieces = (body[at : at + 1] for at in range(len(body)))  # each has some bytes around it
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/completions", content=pieces, headers=headers, timeout=WAIT)
    assert answer.status_code == 200, answer.text


def test_a_server_that_is_told_to_stop_finishes_what_runs(served: Command) -> None:
    """Nothing behind this test has it."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    threads, answers = in_background(3, served, **LONG)
    until(lambda: running(served) == 3)
    served.process.send_signal(signal.SIGTERM)
    until(lambda: any("stopping" in line for line in served.lines))
    try:
        late = ask(served, **SHORT)
        assert late.status_code == 503 and "Retry-After" in late.headers
    except httpx.TransportError:  # it has stopped already
        assert served.wait() == 0
    for thread in threads:
        thread.join(WAIT)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [400] * 3
    assert served.wait() == 0
    assert not psutil.wait_procs(children, WAIT)[1]
    assert "Traceback" not in "\n".join(served.lines)
