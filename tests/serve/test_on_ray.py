"""`fastgen-serve --ray`: a cluster on this machine with two replicas, one of which is killed under load."""

from __future__ import annotations

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

from fastgen.pipeline.errors import SetupError
from fastgen_serve import on_ray
from fastgen_serve.main import main, read
from fastgen_serve.settings import ServeSettings
from tests.serve import checkpoints
from tests.serve.servers import GPT2, WAIT, Command, command, damaged, until

KEY = {"Authorization": "Bearer secret"}
PROMPT, TOKENS = checkpoints.PROMPT, 200
LONG = {"prompt": PROMPT, "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0}
CLIENTS, REQUESTS = 6, 4


@pytest.fixture(scope="module")
def ray() -> Any:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'fastgen-transformers[ray]'")
    return pytest.importorskip(
        "ray.serve", reason="Ray Serve is not installed: pip install 'fastgen-transformers[ray]'"
    )


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def served(ray: Any, enabled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    words = [GPT2, "--ray", "local", "--replicas", "2", "--port", free_port(), "--api-key-file", str(keys)]
    with command(*words) as made:
        made.wait_until_ready()
        yield made


def ask(server: Command, headers: dict[str, str] = KEY, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=WAIT)


def greedy() -> str:
    """What `generate` makes of the prompt."""
    [text] = checkpoints.texts(GPT2, PROMPT, num_beams=1, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    return text


def replicas(server: Command) -> dict[int, psutil.Process]:
    """The processes of the replicas, by their ids."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return {child.pid: child for child in children if "ServeReplica" in " ".join(child.cmdline())}


def answering(server: Command) -> set[str]:
    """The beginnings of the processes that answer: of each replica, sooner or later."""
    begins = set()
    for _ in range(16):
        text = httpx.get(f"{server.url}/metrics", headers=KEY, timeout=WAIT).text
        begins |= set(re.findall(r"^process_start_time_seconds (\S+)", text, re.M))
    return begins


def test_replicas_give_what_generate_gives(served: Command) -> None:
    expected = greedy()
    assert len(replicas(served)) == len(answering(served)) == 2
    answer = ask(served, {**KEY, "X-Request-Id": "mine"}, **LONG)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected
    assert answer.headers["x-request-id"] == "mine"
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}, headers=KEY, timeout=WAIT
    ) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 10


def test_keys_and_the_log_are_as_without_ray(served: Command) -> None:
    refused = ask(served, {}, **LONG)
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    until(lambda: any(f'"id": "{refused.headers["x-request-id"]}"' in line for line in served.lines))
    assert "secret" not in "\n".join(served.lines) and "Traceback" not in "\n".join(served.lines)


def test_a_replica_that_is_killed_under_load_comes_back(served: Command) -> None:
    """Requests that it had fail. All that are sent once more succeed."""
    expected = greedy()
    before, begins = replicas(served), answering(served)
    texts: list[str] = []
    again: list[Any] = []
    first = threading.Event()

    def client() -> None:
        for _ in range(REQUESTS):
            try:
                answer = ask(served, **LONG)
            except httpx.TransportError as error:
                answer = error
            if not isinstance(answer, httpx.Response) or answer.status_code != 200:
                again.append(answer)
                answer = ask(served, **LONG)
            texts.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)
            first.set()

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    assert first.wait(WAIT)
    killed = next(iter(before.values()))
    models = killed.children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT)
    assert texts == [expected] * CLIENTS * REQUESTS
    assert 1 <= len(again) <= CLIENTS
    assert not psutil.wait_procs(models, WAIT)[1]
    until(lambda: len(answering(served) - begins) == 1, every=0.5)
    assert len(set(replicas(served)) & set(before)) == 1 and len(replicas(served)) == 2


def test_sigterm_finishes_what_runs_and_ends_the_cluster(served: Command) -> None:
    """The last test of this server."""
    processes = psutil.Process(served.process.pid).children(recursive=True)
    body = {**LONG, "max_tokens": 400, "min_tokens": 400, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=KEY, timeout=WAIT) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        *_, usage, done = lines
    assert done == "data: [DONE]" and '"completion_tokens":400' in usage.replace(" ", "")
    assert served.wait() == 0
    assert not psutil.wait_procs(processes, WAIT)[1]


def test_a_model_that_cannot_be_loaded_ends_the_command(ray: Any, tmp_path: Path) -> None:
    with command(f"broken={damaged(tmp_path)}", "--ray", "--port", free_port()) as server:
        assert server.wait() == 2
    assert "cannot be loaded" in server.lines[-1] and "Traceback" not in server.lines[-1]


def test_what_a_deployment_is_told(ray: Any) -> None:
    settings = ServeSettings(
        models=(("a", GPT2), ("b", GPT2)), ray="local", replicas=2, max_replicas=5, threads=3, slots=8, drain_s=7
    )
    deployment = on_ray.application(settings)._bound_deployment
    options = deployment._deployment_config
    assert deployment.ray_actor_options["num_cpus"] == 6
    scaling = options.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 8)
    assert options.graceful_shutdown_timeout_s > 7 and options.max_ongoing_requests > 2 * (8 + settings.max_waiting)


def test_options_for_machines() -> None:
    found = read([GPT2, "--ray", "--replicas", "2", "--max-replicas", "4", "--requests-per-replica", "10"])
    assert (found.ray, found.replicas, found.max_replicas, found.requests_per_replica) == ("local", 2, 4, 10)
    assert read([GPT2, "--ray", "10.0.0.1:6379"]).ray == "10.0.0.1:6379" and read([GPT2]).ray is None


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"--ray needs the package ray, .* pip install '.*\[ray\]'"):
        on_ray.run(ServeSettings(models=(("gpt2", GPT2),), ray="local"))
    assert main([GPT2, "--ray", "local", "--port", free_port()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_port_that_is_taken_is_told_before_anything_begins(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([GPT2, "--ray", "local", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen at 127.0.0.1" in capsys.readouterr().err
