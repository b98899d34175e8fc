"""What `examples/demo.py` starts ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.skipif(os.name == "nt", reason="no such signals")
def test_a_terminated_demo_leaves_no_process() -> None:
    script = f"import runpy, sys; runpy.run_path({str(DEMO)!r})['run']([sys.executable, '-c', {CHILD!r}])"
    demo = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(demo.stdout.readline())
    try:
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=60) == 128 + signal.SIGTERM
        deadline = time.monotonic() + 20
        while psutil.pid_exists(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        demo.kill()
        if psutil.pid_exists(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(os.name == "nt", reason="no such signals")
def test_ctrl_c_leaves_one_line_and_nothing_else(tmp_path: Path) -> None:
    """As from a terminal, which interrupts the demo and what it has started."""
    pytest.importorskip("transformers")
    demo = subprocess.Popen(
        [sys.executable, str(DEMO), "--limit", "64", "--prompts", "2", "--output", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert demo.stderr.readline() == "restore, Transformers ...\n"
        assert demo.stderr.readline().startswith("model: ")  # it generates
        os.killpg(demo.pid, signal.SIGINT)
        said, errors = demo.communicate(timeout=120)
    finally:
        demo.kill()
    assert demo.returncode == 130 and said == ""
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1 and "interrupted" in lines[0], errors
