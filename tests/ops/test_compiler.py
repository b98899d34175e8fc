"""What the compiler makes of the loops of the operators on the CPU."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_CSRC = _ROOT / "fastgen/csrc/cpu"
_FUNCTIONS = ("sigmoid", "silu", "hyperbolic_tangent", "gelu", "gelu_tanh")
_LOOP = """
__attribute__((target("avx2"))) void loop_FUNCTION(const float* x, float* y, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) y[i] = fastgen::FUNCTION(x[i]);
}
"""


def _options(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("FASTGEN_NO_EXT", raising=False)
    monkeypatch.chdir(_ROOT)
    extensions = runpy.run_path("setup.py")["extensions"]()
    return next(each.extra_compile_args for each in extensions if each.name.endswith("_cpu"))


def _gcc() -> str | None:
    """For this processor's instructions; it alone says what has become vectors."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    return compiler if "Free Software Foundation" in version else None


@pytest.mark.skipif(_gcc() is None, reason="there is no gcc for x86")
def test_activations_become_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "loop.cpp"
    text = "".join(_LOOP.replace("FUNCTION", function) for function in _FUNCTIONS)
    source.write_text(f'#include "elementwise/functions.h"\n{text}')
    lines = source.read_text().splitlines()
    command = [_gcc(), *_options(monkeypatch), f"-I{_CSRC}", "-fopt-info-vec-optimized", "-c", str(source)]
    made = subprocess.run([*command, "-o", str(tmp_path / "loop.o")], capture_output=True, text=True, check=True)
    found = re.findall(rf"{source}:(\d+):.*loop vectorized using 32 byte vectors", made.stderr)
    assert {lines[int(number) - 1].partition("fastgen::")[2].partition("(")[0] for number in found} == {*_FUNCTIONS}
