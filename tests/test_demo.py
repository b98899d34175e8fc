"""What `examples/demo.py` starts ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
        while _is_alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        demo.kill()
        if _is_alive(child):
            os.kill(child, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
