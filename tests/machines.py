"""Runs tests as on other machines: instruction sets, numbers of threads, with and without oneDNN. Prints a table.

    python -m tests.machines [--only avx2-1-on] [arguments of pytest]

An instruction set that the processor lacks is left out. oneDNN is off in the test process itself, not in processes that
tests start: torch has no environment variable for it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys

CAPABILITIES = ("default", "avx2", "avx512")
THREADS = (1, 2, 4)
ONEDNN = ("on", "off")
# Where results depend on how sums are rounded.
NUMERICAL = (
    "tests/equivalence/test_options.py",
    "tests/equivalence/test_inputs.py",
    "tests/equivalence/test_models.py",
    "tests/equivalence/test_half.py",
    "tests/fairseq/test_generate.py",
    "tests/ops",
    "tests/decoding",
)
# pytest's statuses: all passed, some failed.
_RAN = (0, 1)


def configurations() -> list[tuple[str, int, str]]:
    """What this processor can run: instruction set, threads, oneDNN."""
    show = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    best = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip().lower()
    supported = CAPABILITIES[: CAPABILITIES.index(best) + 1]
    return list(itertools.product(supported, THREADS, ONEDNN))


def run(capability: str, threads: int, onednn: str, arguments: list[str]) -> tuple[int, str]:
    """The exit status of pytest, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "--threads", str(threads), "--onednn", onednn, *arguments]
    # More threads than cores would keep each other waiting.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def count(output: str, what: str) -> int:
    """The number in front of a word in pytest's output: `3 failed`, `2 near-ties`."""
    found = re.findall(rf"(\d+) {what}\b", output)
    return int(found[-1]) if found else 0


def names_tests(arguments: list[str]) -> bool:
    """Whether pytest's arguments say which tests to run."""
    return any(os.path.exists(argument.partition("::")[0]) for argument in arguments)


def main() -> int:
    """The status is 1 if a test failed in any configuration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m tests.machines")
    parser.add_argument("--only", action="append", help="one configuration, such as avx2-1-on; may be repeated")
    options, arguments = parser.parse_known_args()
    failed = False
    print(f"{'configuration':16}{'passed':>8}{'failed':>8}{'near-ties':>11}")
    for configuration in configurations():
        name = "-".join(map(str, configuration))
        if options.only and name not in options.only:
            continue
        status, output = run(*configuration, arguments if names_tests(arguments) else [*NUMERICAL, *arguments])
        failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if status not in _RAN:
            failures = failures or [f"pytest ended with status {status}", *output.splitlines()[-20:]]
        counts = [count(output, what) for what in ("passed", "failed", "near-ties")]
        print(f"{name:16}{counts[0]:>8}{counts[1]:>8}{counts[2]:>11}", *failures, sep="\n    ", flush=True)
        failed |= bool(failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
