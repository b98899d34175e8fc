"""`fastgen-serve` as a process: what it says before it serves, and how it ends when something takes too long."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest

from fastgen_serve.app import create_app
from fastgen_serve.main import listen, main
from fastgen_serve.models import Models
from fastgen_serve.server import Server
from fastgen_serve.settings import ServeSettings
from tests.serve.servers import GPT2, LONG, WAIT, command, damaged, in_background, running, until


def test_the_body_of_an_answer_does_not_wait_for_the_client() -> None:
    with listen(ServeSettings(port=0)) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


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
        answers = in_background(8, server, **LONG)
        until(lambda: running(server) == 8)
        children = psutil.Process(server.process.pid).children(recursive=True)
        (tokenising,) = in_background(1, server, prompt="in the beginning " * 1000)
        until(lambda: "it is stuck" in server.lines)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        statuses = [answer.result(WAIT).status_code for answer in answers]
        assert 503 in statuses and {*statuses} <= {200, 503} and tokenising.result(WAIT).status_code == 503
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
