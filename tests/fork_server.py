"""Runs Python programs in forks of one process that has imported torch and Transformers already.

    python -m tests.fork_server FOLDER PROCESS

It writes to FOLDER/bin a `python` and the commands of pyproject.toml. Each of them runs what the real one would run,
with the same arguments, environment, folder and standard streams, and ends with its exit status. An interrupt is
passed on, and whoever is killed takes the program along. The interpreter is already there, which saves seconds each
time.

Programs of FastGen are forks of a process that has imported it, too, and those for FairSeq of one that has FairSeq as
well. Others, and those whose environment has settings of FastGen's, which it reads when it is imported, are forks of
one without. All of it ends with PROCESS.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
# What is imported for a program, by what its name has, or that of its module.
LEVELS = {"fairseq": ["fairseq"], "fastgen": ["fastgen", "tests.docs.run_page"]}
# What the commands import when they need it.
IMPORTED_LATE = [
    "fastgen.models.unilm",
    "fastgen.pipeline.encoding.run",
    "fastgen.pipeline.generation.run",
    "fastgen.pipeline.quantizing.run",
    "fastgen.quantization.report",
]
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
module = sys.argv[2] if sys.argv[1:2] == ["-m"] else {program!r}
own_settings = any(name.startswith("FASTGEN_") and name != "FASTGEN_CACHE" for name in os.environ)
found = [level for level, names in {levels!r}.items() if any(name in module for name in names) and not own_settings]
server = socket.socket(socket.AF_UNIX)
server.connect({folder!r} + "/" + (found or ["nothing"])[0])
signal.signal(signal.SIGINT, lambda *_: server.sendall(b"interrupt\\n"))
request = {{"program": {program!r}, "words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(server, [b"0"], [0, 1, 2])
server.sendall(json.dumps(request).encode() + b"\\n")
sys.exit(int(server.makefile().readline() or 70))
"""


def main(folder: Path, user: int) -> None:
    scripts = dict(
        re.findall(r'^([\w-]+) = "(fastgen_cli\.\w+:\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    )
    (folder / "bin").mkdir()
    for program in ("python", *scripts):
        path = folder / "bin" / program
        path.write_text(CLIENT.format(python=sys.executable, folder=str(folder), levels=LEVELS, program=program))
        path.chmod(0o755)
    import torch  # noqa: F401
    import transformers
    from transformers import generation  # noqa: F401
    from transformers.models.auto import modeling_auto, tokenization_auto  # noqa: F401
    from transformers.models.bart import modeling_bart  # noqa: F401
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

    assert transformers.AutoTokenizer is not None
    for name in ("sacrebleu", "rouge_score.rouge_scorer", "matplotlib.figure", "hydra"):  # metrics, reports, FairSeq
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError, AttributeError):  # what every checkpoint is loaded with, of all models
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bart")
    _serve_in_a_fork(folder / "nothing", scripts)
    for name in ("fastgen", *(program.partition(":")[0] for program in scripts.values()), *IMPORTED_LATE):
        importlib.import_module(name)
    _serve_in_a_fork(folder / "fastgen", scripts)
    with contextlib.suppress(ImportError):
        importlib.import_module("fairseq")
    _serve_in_a_fork(folder / "fairseq", scripts)
    print("ready", flush=True)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(user, 0)  # which only looks whether it is there
            time.sleep(1)
    shutil.rmtree(folder)
    os.killpg(0, signal.SIGKILL)


def _serve_in_a_fork(address: Path, scripts: dict[str, str]) -> None:
    """Has a fork run programs with what has been imported so far."""
    # Programs need not look through what stays, and copy it by that.
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        if os.fork() == 0:
            _serve(listening, scripts)


def _serve(listening: socket.socket, scripts: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection = listening.accept()[0]
        if os.fork() == 0:
            listening.close()
            _run_for(connection, scripts)
        connection.close()


def _run_for(connection: socket.socket, scripts: dict[str, str]) -> NoReturn:
    # This fork waits for the program, which is a fork of its own, and reports how it ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    lines = connection.makefile()
    request = json.loads(lines.readline())
    program = os.fork()
    if program != 0:
        threading.Thread(target=_pass_on, args=(lines, program), daemon=True).start()
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        connection.sendall(f"{status if status >= 0 else 128 - status}\n".encode())
        os._exit(0)
    connection.close()
    try:
        sys.exit(_run(request, streams, scripts))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _end(end.code or 0)
        raise
    finally:
        gc.unfreeze()  # Triton's bindings print what is not freed in the end


def _end(status: int) -> None:
    """Ends the process as Python does, but without freeing what was imported: that would copy it, for seconds.

    Returns where output cannot be written: what Python says then, it is to say itself.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return
    os._exit(status & 0xFF)


def _pass_on(lines: Iterable[str], program: int) -> None:
    """Interrupts `program` for each line that comes, and kills it once nobody is left to send one."""
    with contextlib.suppress(ProcessLookupError):
        for _ in lines:
            os.kill(program, signal.SIGINT)
        os.kill(program, signal.SIGKILL)


def _run(request: dict[str, Any], streams: list[int], scripts: dict[str, str]) -> int:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    program, words = request["program"], request["words"]
    try:
        if program != "python":
            module, _, function = scripts[program].partition(":")
            sys.argv = [program, *words]
            return int(getattr(__import__(module, fromlist=[function]), function)() or 0)
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)  # a real one has not imported it before
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
