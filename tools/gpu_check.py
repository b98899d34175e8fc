"""`make gpu-check`: builds, tests and measures everything that needs an NVIDIA GPU, in under nine minutes.

It installs nothing: the Python that runs it must have torch, and for the tests pytest and hypothesis; pytest-xdist
distributes the tests over several processes. It builds csrc in place. Stages run one after another, each in processes
of its own with a budget of seconds, so that a stage that is slow, fails or crashes does not affect the others:

    build        the CUDA operators of csrc, for the present GPU
    kernels      tests of operators and of the KV cache on the GPU, with new random inputs each time
    equivalence  patched against unpatched generation on the GPU, with captured steps if supported; in random order, as
                 many cases as the budget allows
    memcheck     the CUDA operators and the Triton kernels under compute-sanitizer, if that works
    benchmarks   the workloads, with all the time that is left

Half precision is measured, not asserted: the workload gpu-half-precision reports its effect on BLEU and ROUGE.

The benchmarks write results.json and results.md to benchmarks/results/<gpu>; the check adds gpu-check.json and
gpu-check.md. The output of the stages is in the folder `logs` beside them, which git ignores.

Exit status: 0 all stages passed; 1 one did not; 2 wrong options, or no torch; 3 no GPU; 130 interrupted. (make returns
2 for each of them but the first.)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.processes import GRACE_SECONDS, Finished, Processes

ROOT = Path(__file__).resolve().parents[1]
OK, FAILED, USAGE, NO_GPU, INTERRUPTED = 0, 1, 2, 3, 130
PASSED, SKIPPED, NOT_PASSED = "passed", "skipped", "FAILED"
LATE = "the time is over"  # reason of a test that was left out

TOTAL_SECONDS = 525.0  # nine minutes, less the time for starting and stopping
_LEAST_SECONDS = 10.0  # no workload starts with fewer
_WORKLOAD_SECONDS = 90.0  # for each workload

KERNEL_TESTS = ("tests/ops", "tests/decoding", "tests/pipeline/test_memory.py")
# The files whose tests run models and inputs that can be moved to the GPU; the others test fallbacks, or CPU-only
# features.
EQUIVALENCE_TESTS = tuple(
    f"tests/equivalence/test_{name}.py"
    for name in ("captured", "captured_low_bit", "captured_random", "models", "options", "half", "composites")
)

_PROBE = """
import json, sys
import torch
about = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    from benchmarks import machine
    # A device that is listed may still be unusable.
    torch.ones(8, device="cuda").sum().item()
    major, minor = torch.cuda.get_device_capability()
    about.update(gpu=torch.cuda.get_device_name(), architecture=f"sm_{major}{minor}", commit=machine.commit())
    about["slug"] = machine.slug(machine.describe_machine(torch.device("cuda")))
print("probe: " + json.dumps(about))
"""


@dataclass
class Outcome:
    """The result of a stage."""

    state: str
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Stage:
    """A part of the check. `run` gets its budget in seconds."""

    name: str
    seconds: float
    run: Callable[[float], Outcome]


def say(line: str) -> None:
    """Prints a line immediately, so that the output of a killed run is complete."""
    print(line, flush=True)


def environment_of_stages() -> dict[str, str]:
    """Returns the environment of the stages: without variables that change the tests, and without network."""
    # Includes FastGen's own settings: the defaults are checked, captured steps included.
    dropped = ("CI", "TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "PYTEST_", "FASTGEN_")
    kept = {name: each for name, each in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class Check:
    """The stages, on the GPU that `about` describes."""

    def __init__(self, about: dict[str, Any], processes: Processes, out: Path, workers: int, seed: int) -> None:
        self.about = about
        self.processes = processes
        self.out = out
        self.workers = workers
        self.seed = seed
        self.device = "cuda"

    def stages(self) -> list[Stage]:
        """Returns all stages, in order; the budgets of all but the last add up to less than the check's limit."""
        return [
            Stage("build", 60, self.build),
            Stage("kernels", 100, self.kernels),
            Stage("equivalence", 90, self.equivalence),
            Stage("memcheck", 45, self.memcheck),
            Stage("benchmarks", TOTAL_SECONDS, self.benchmarks),
        ]

    def build(self, seconds: float) -> Outcome:
        library = ROOT / "fastgen" / "ops" / "libfastgen_cuda.so"
        library.unlink(missing_ok=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        wanted = {"FASTGEN_DEVICES": "cuda", "FASTGEN_CUDA_ARCH": self.about["architecture"]}
        done = self.processes.run("build", command, seconds, **wanted)
        said = re.findall(r"^fastgen: (.*)", done.output, re.MULTILINE)
        if done.timed_out:
            return Outcome(NOT_PASSED, f"not done after {seconds:.0f} s")
        if done.status != 0 or not library.exists():
            return Outcome(NOT_PASSED, said[-1] if said else last_line(done.output))
        return Outcome(PASSED, f"csrc for {self.about['architecture']}")

    def kernels(self, seconds: float) -> Outcome:
        return self.tests("kernels", KERNEL_TESTS, seconds, least=0.9)

    def equivalence(self, seconds: float) -> Outcome:
        outcome = self.tests("equivalence", EQUIVALENCE_TESTS, seconds, least=0.1)
        if outcome.data["captured"] or not is_installed("triton"):
            return outcome
        reasons = outcome.data["left_out"]
        why = max(reasons, key=reasons.__getitem__) if reasons else "nothing was tried"
        return Outcome(NOT_PASSED, f"{outcome.detail}; no decoding step was captured: {why}", outcome.data)

    def tests(self, name: str, paths: Sequence[str], seconds: float, least: float) -> Outcome:
        """Runs the tests of `paths`; passes if none fails and at least a share of `least` ran."""
        report = self.processes.logs / f"{name}.jsonl"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *paths, "-q", "--maxfail=20", f"--hypothesis-seed={self.seed}"]
        several = ["-n", str(self.workers), "--dist", "worksteal"] if is_installed("xdist") else []
        command += ["-p", "tools.gpu_tests", "-p", "no:cacheprovider", *several]
        changes = {
            "FASTGEN_GPU_TESTS_REPORT": str(report),
            "FASTGEN_GPU_TESTS_SEED": str(self.seed),
            "FASTGEN_GPU_TESTS_STOP": str(time.time() + max(seconds - 2 * GRACE_SECONDS, 1.0)),
            # tests/conftest.py looks for the device here before it has options, also in pytest-xdist's processes.
            "PYTEST_ADDOPTS": f"--device={self.device}",
            # More host threads in each process would only compete.
            "OMP_NUM_THREADS": "1",
        }
        done = self.processes.run(name, command, seconds - GRACE_SECONDS, **changes)
        return judge_tests(read_lines(report), done, least, self.seed)

    def memcheck(self, seconds: float) -> Outcome:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            return Outcome(SKIPPED, "compute-sanitizer is not installed")
        command = [sanitizer, "--tool", "memcheck", "--leak-check", "no", "--print-limit", "20"]
        command += [sys.executable, "-m", "tools.memcheck"]
        # torch's caching allocator would hide an access beyond a tensor inside a larger block.
        done = self.processes.run("memcheck", command, seconds - GRACE_SECONDS, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        return judge_memcheck(done)

    def benchmarks(self, seconds: float) -> Outcome:
        """Runs each workload in a process of its own: one that crashes may leave the device unusable to its process."""
        end = time.monotonic() + seconds - GRACE_SECONDS
        base = [sys.executable, "-m", "benchmarks"]
        listed = self.processes.run("benchmarks-list", [*base, "--list"], min(60, seconds - GRACE_SECONDS))
        names = [line.split()[0] for line in listed.output.splitlines() if line.startswith("gpu-")]
        if listed.status != 0 or not names:
            return Outcome(NOT_PASSED, f"no list of workloads: {last_line(listed.output)}")
        done, left_out, bad = [], [], []
        for name in names:
            left = end - time.monotonic()
            if left < _LEAST_SECONDS:
                left_out.append(name)
                continue
            command = [*base, "--device", self.device, "--out", str(self.out.parent), "--only", name]
            finished = self.processes.run(f"benchmarks-{name}", command, min(left, _WORKLOAD_SECONDS))
            (left_out if finished.timed_out else done if finished.status == 0 else bad).append(name)
        detail = f"{len(done)} workloads" + (f"; no time for {', '.join(left_out)}" if left_out else "")
        detail += f"; not identical or failed: {', '.join(bad)}" if bad else ""
        data = {"done": done, "left_out": left_out, "bad": bad}
        return Outcome(NOT_PASSED if bad or not done else PASSED, detail, data)


def judge_tests(lines: Sequence[dict[str, Any]], done: Finished, least: float, seed: int) -> Outcome:
    """Summarises the reports of a test stage's processes. A process that wrote nothing has failed."""
    chosen = sum(line.get("chosen", 0) for line in lines)
    tests = [line for line in lines if "test" in line and line["reason"] != LATE]
    count = Counter(line["outcome"] for line in tests)
    reasons = Counter(line["reason"] for line in tests if line["outcome"] == "skipped")
    left_out, captured = Counter[str](), sum(line.get("captured", 0) for line in tests)
    for line in tests:
        left_out.update(line.get("left_out", {}))
    failures = [f"{line['test']}: {line['reason']}" for line in tests if line["outcome"] == "failed"]
    # 0 all passed, 1 some failed, 2 interrupted or stopped, 5 no test.
    if not tests or (done.status not in (0, 1, 2, 5) and not done.timed_out):
        failures.append(f"the tests ended with status {done.status}: {last_line(done.output)}")
    ran = count.total()
    states = {state: count[state] for state in ("passed", "failed", "skipped")}
    data = {"chosen": chosen, **states, "failures": failures, "skips": dict(reasons), "seed": seed}
    data |= {"captured": captured, "left_out": dict(left_out)}
    detail = f"{', '.join(f'{number} {state}' for state, number in states.items())} of {chosen}, seed {seed}"
    if captured:
        detail += f"; {captured} calls with a captured step"
    if ran < chosen:
        detail += f"; {chosen - ran} left out at the end of the time"
    enough = chosen > 0 and ran >= least * chosen and count["passed"] > 0
    return Outcome(PASSED if enough and not failures else NOT_PASSED, detail, data)


def judge_memcheck(done: Finished) -> Outcome:
    """Summarises compute-sanitizer's findings. An unsupported device does not count as a failure."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", done.output)
    checked = re.search(r"^memcheck: (.*)", done.output, re.MULTILINE)
    if "Device not supported" in done.output:
        return Outcome(SKIPPED, "compute-sanitizer does not support this device or machine")
    if found and int(found[1]) > 0:
        first = re.search(r"========= ((?:Invalid|Out-of|Misaligned|Program).*)", done.output)
        return Outcome(NOT_PASSED, f"{found[1]} errors" + (f", first: {first[1]}" if first else ""))
    if done.timed_out:
        return Outcome(SKIPPED, "not done in its time; no error until then")
    if done.status == 0 and found and checked:
        return Outcome(PASSED, checked[1])
    return Outcome(NOT_PASSED, f"ended with status {done.status}: {last_line(done.output)}")


def run_stages(stages: Sequence[Stage], seconds: float) -> dict[str, Outcome]:
    """Runs the stages. An error in one does not stop the others, and all stay within the limit."""
    end = time.monotonic() + seconds
    outcomes: dict[str, Outcome] = {}
    for number, stage in enumerate(stages):
        start = time.monotonic()
        budget = min(stage.seconds, end - start)
        say(f"[{number + 1}/{len(stages)}] {stage.name}: up to {max(budget, 0):.0f} s")
        if budget < 2 * GRACE_SECONDS + 2:
            outcome = Outcome(NOT_PASSED, "no time was left")
        else:
            try:
                outcome = stage.run(budget)
            except Exception as error:
                outcome = Outcome(NOT_PASSED, f"{type(error).__name__}: {error}")
        outcome.seconds = time.monotonic() - start
        outcomes[stage.name] = outcome
        say(f"    {outcome.state} in {outcome.seconds:.0f} s: {outcome.detail}")
        for line in outcome.data.get("failures", [])[:20]:
            say(f"    {line}")
    return outcomes


def summary(about: dict[str, Any], outcomes: dict[str, Outcome]) -> str:
    """Returns a Markdown table of the stages."""
    lines = [f"# Check on {about['gpu']}", ""]
    lines += [f"- torch {about['torch']}, CUDA {about['cuda']}, commit {about.get('commit') or 'unknown'}", ""]
    lines += ["| stage | result | seconds | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {outcome.state} | {outcome.seconds:.0f} | {outcome.detail.replace('|', '/')} |"
        for name, outcome in outcomes.items()
    ]
    return "\n".join(lines) + "\n"


def probe() -> dict[str, Any] | None:
    """Returns torch's description of the GPU, read in another process; None without torch."""
    if not is_installed("torch"):
        return None
    options = {"cwd": ROOT, "env": environment_of_stages(), "stdin": subprocess.DEVNULL}
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, **options)
    found = re.search(r"^probe: (.*)", done.stdout, re.MULTILINE)
    if not found:
        return {"torch": "?", "cuda": None, "gpu": None, "error": last_line(done.stderr)}
    return json.loads(found[1])


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    beside = os.pathsep.join(str(Path(home, "bin")) for home in homes if home)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; ignores a truncated last line."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check.py", description="Checks and measures FastGen on an NVIDIA GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run these stages")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all stages (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a new one)")
    parser.add_argument("--workers", type=int, default=max(2, min(12, (os.cpu_count() or 4) - 2)), metavar="N")
    options = parser.parse_args(arguments)
    start = time.monotonic()  # includes a first import of torch, which takes a while
    about = probe()
    if about is None:
        say(f"gpu-check: {sys.executable} has no torch; name another one: make gpu-check PYTHON=...")
        return USAGE
    if about["gpu"] is None:
        why = about.get("error") or (f"CUDA {about['cuda']}" if about["cuda"] else "a build without CUDA")
        say(f"gpu-check: no NVIDIA GPU that torch can use (torch {about['torch']}, {why}); nothing was done")
        return NO_GPU

    folder = options.out.resolve() / about["slug"]
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    check = Check(about, Processes(folder / "logs", environment_of_stages()), folder, options.workers, seed)
    stages = {stage.name: stage for stage in check.stages()}
    if unknown := set(options.only or ()) - stages.keys():
        say(f"gpu-check: there is no stage {', '.join(sorted(unknown))}: the stages are {', '.join(stages)}")
        return USAGE

    say(f"gpu-check: {about['gpu']}, torch {about['torch']}, CUDA {about['cuda']}, Python {sys.version.split()[0]}")
    chosen = [stage for name, stage in stages.items() if not options.only or name in options.only]
    try:
        outcomes = run_stages(chosen, options.seconds - (time.monotonic() - start))
    except KeyboardInterrupt:
        say("gpu-check: interrupted")
        return INTERRUPTED
    text = summary(about, outcomes)
    data = {"about": about, "stages": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    (folder / "gpu-check.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu-check.md").write_text(text, encoding="utf-8")
    say(f"\n{text}\ngpu-check: results are in {folder}")
    return FAILED if any(outcome.state == NOT_PASSED for outcome in outcomes.values()) else OK


if __name__ == "__main__":
    sys.exit(main())
