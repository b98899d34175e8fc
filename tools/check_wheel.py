"""Installs the wheel in dist/ where there is no compiler, and generates there with and without it: `make check-wheel`.

    python tools/check_wheel.py [--with torch==2.10.0] [--tests] [PYTHON ...]

For each Python (default: the one that runs this) it makes a virtual environment, installs the wheel with transformers,
and generates on the models of examples/. Operators must be the compiled ones, tokens must be identical, and what an
operator raises must reach Python. With --tests, every model that must be accelerated runs there both ways
(tests/survey.py), and so does the fast part of the tests. First `auditwheel` says which systems the wheel fits. The
exit status is 1 where anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 28)
# The fast part of the tests: those that depend on the installed Python and torch.
FAST = """
tests/test_counters.py tests/test_patching.py tests/test_settings.py tests/ops tests/decoding tests/models/test_unilm.py
tests/equivalence/test_versions.py tests/equivalence/test_transparent.py tests/equivalence/test_captured.py
""".split()
# Tests that need a compiler, or files of the repository outside of the package.
LEFT_OUT = "test_compiler.py gpu test_package.py".split()
TOOLS = "pytest pytest-xdist pytest-timeout hypothesis gguf compressed-tensors".split()
TRY = """
import platform, sys
from pathlib import Path
import fastgen, torch, transformers
from fastgen import ops
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

print("Python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
assert Path(sys.prefix) in Path(fastgen.__file__).parents, fastgen.__file__
print(fastgen.status())
some = ("linear.choose",)  # is no kernel
others = {name: backend for name, backend in ops.backends().items() if not backend.startswith("C++")}
assert not others.keys() - set(some), others
try:
    torch.ops.fastgen.no_repeat_ngram_(torch.zeros(1, 4), torch.tensor([[1, 2, 1]]), None, 0)
except RuntimeError as error:
    assert "n must be at least 1" in str(error), error
else:
    raise AssertionError("an operator did not raise")
fastgen.enable(strict=True)
text = Path(sys.argv[1], "data", "heldout.src.txt").read_text(encoding="utf-8").splitlines()[:8]
for name, kind in (("kjv-bart", AutoModelForSeq2SeqLM), ("kjv-gpt2", AutoModelForCausalLM)):
    folder = Path(sys.argv[1], "models", name)
    model, tokenizer = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(text, padding=True, truncation=True, max_length=64, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    result = fastgen.compare(model, dict(inputs), num_beams=4, no_repeat_ngram_size=3, max_new_tokens=32)
    print(f"{name}: {result}")
    assert result.identical
"""


def problems_of(wheel: Path) -> list[str]:
    """Returns what prevents the wheel from running on systems with this glibc. torch provides libtorch_cpu."""
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", "--json", wheel], stdout=subprocess.PIPE)
    found = json.loads(shown.stdout)
    if "error" in found:
        return [found["error"] + "; `pip wheel -v` shows what the compiler said"]
    print(f"auditwheel: symbols of {found['sym_tag']}, needs {', '.join(found['external_libs'])}", flush=True)
    problems = [f"it needs {name}" for name in found["external_libs"] if name != "libtorch_cpu.so"]
    if tuple(int(part) for part in found["sym_tag"].split("_")[1:3]) > GLIBC:
        problems.append(f"it needs {found['versioned_symbols']}")
    return problems


def works_with(python: str, wheel: Path, others: list[str], with_tests: bool) -> bool:
    """Returns whether the wheel works in a new environment of this Python, with only the environment in PATH.

    Args:
        others: additional packages to install, as pip names them.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        there = Path(folder, "bin", "python")
        environment = {"PATH": str(there.parent), "LANG": "C.UTF-8", "HOME": folder}

        def install(*packages: str) -> None:
            # pip may need this machine's settings for the index; all other commands get none.
            command = [there, "-m", "pip", "install", "-q", *packages]
            subprocess.run(command, env=os.environ | {"PATH": environment["PATH"]}, check=True)

        def run(*words: str | Path, where: str | Path = folder) -> bool:
            return subprocess.run([there, *words], cwd=where, env=environment).returncode == 0

        install(f"fastgen-transformers[transformers] @ {wheel.as_uri()}", *others)
        if not with_tests:
            return run("-c", TRY, ROOT / "examples")
        install(f"fastgen-transformers[cli] @ {wheel.as_uri()}", *TOOLS, *others)
        tests = Path(folder, "tree")
        for part in ("tests", "examples", "docs", "benchmarks", "tools"):
            shutil.copytree(ROOT / part, tests / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / part, tests)
        left_out = [f"--ignore-glob=*/{name}" for name in LEFT_OUT]
        pytest = ["-m", "pytest", "-q", "--numprocesses", "auto", "--maxprocesses", "8", *left_out, *FAST]
        # Runs all of them, even if one fails.
        return all(
            [
                run("-c", TRY, ROOT / "examples"),
                run("-m", "tests.release_report", "--no-tests", where=tests),
                run(*pytest, where=tests),
            ]
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--with", dest="others", action="append", default=[], help="a package that pip installs as well"
    )
    parser.add_argument("--tests", action="store_true", help="also run the fast part of the tests")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    options = parser.parse_args()
    (wheel,) = (ROOT / "dist").glob("fastgen_transformers-*.whl")
    problems = problems_of(wheel)
    for python in options.pythons:
        print(f"{wheel.name} with {python}", flush=True)
        if not problems and not works_with(python, wheel, options.others, options.tests):
            problems.append(f"it does not work with {python}")
    for problem in problems:
        print(f"check_wheel: {wheel.name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
