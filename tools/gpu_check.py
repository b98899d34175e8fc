"""`make gpu-check`: builds, tests and measures everything that needs an NVIDIA GPU, in under nine minutes.

It installs nothing and needs no virtual environment: it uses the Python that runs it, which must have torch, and builds
csrc in place. Stages run one after another, each in processes of its own with a budget of seconds, so that one that is
slow, fails or crashes costs the others nothing:

    build        the CUDA operators of csrc, for the GPU that is there
    kernels      tests of operators and of the K/V store on the GPU, with new random inputs each time
    equivalence  patched against unpatched generation on the GPU, with captured steps where they serve; in random order,
                 as many cases as the budget allows
    memcheck     the CUDA operators and the Triton kernels under compute-sanitizer, where that works
    times        times of the kernels against what copying their bytes takes
    benchmarks   the workloads, with all the time that is left

Half precision is measured, not asserted: the workload gpu-half-precision reports what it does to BLEU and ROUGE.

The benchmarks write results.json, results.md and results.png to benchmarks/results/<gpu>; the check adds gpu-check.json
and gpu-check.md to them. What the stages printed is in the folder `logs` beside those, which git does not keep.

Exit status: 0 all stages passed; 1 one did not; 2 wrong options, or no torch; 3 no GPU; 130 interrupted. (make says 2
for each of them but the first.)
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
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OK, FAILED, USAGE, NO_GPU, INTERRUPTED = 0, 1, 2, 3, 130
PASSED, SKIPPED, NOT_PASSED = "passed", "skipped", "FAILED"

TOTAL_SECONDS = 525.0  # nine minutes, less what starting and stopping take
_GRACE_SECONDS = 8.0  # for a process that was asked to end
_LEAST_SECONDS = 10.0  # with fewer, no group of workloads is begun

# What may be missing, and what is not done then. Without those that a stage needs it cannot run, and the check fails.
NEEDED = {
    "pytest": ("kernels", "equivalence"),
    "hypothesis": ("kernels", "equivalence"),
    "wrapt": ("kernels", "equivalence", "memcheck", "times", "benchmarks"),
    "psutil": ("kernels", "equivalence", "memcheck", "times", "benchmarks"),
    "setuptools": ("build",),
    "transformers": ("equivalence", "benchmarks"),
}
OPTIONAL = {
    "triton": "the Triton kernels are neither tested nor measured",
    "matplotlib": "no chart",
    "datasets": "data sets by name cannot be read by fastgen-generate",
    "sacremoses": "no pipeline workload with Moses detokenising",
    "rouge_score": "no ROUGE of half precision with FastGen and without",
    "sacrebleu": "no BLEU of half precision with FastGen and without",
    "fairseq": "no FairSeq rows",
}

KERNEL_TESTS = ("tests/ops", "tests/decoding", "tests/pipeline/test_memory.py")
# The files whose tests run models and inputs that can be moved to the GPU; the others test when to fall back, or what
# is done on a CPU alone.
EQUIVALENCE_TESTS = tuple(
    f"tests/equivalence/test_{name}.py"
    for name in ("captured", "captured_few_bits", "captured_random", "models", "options", "half", "composites")
)

_PROBE = """
import json, sys
import torch
about = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    # A device that is listed may still be unusable.
    torch.ones(8, device="cuda").sum().item()
    major, minor = torch.cuda.get_device_capability()
    about.update(gpu=torch.cuda.get_device_name(), architecture=f"sm_{major}{minor}")
print("probe: " + json.dumps(about))
"""
_SLUG = "import torch; from benchmarks import machine as m; print(m.slug(m.describe_machine(torch.device('cuda'))))"


class Finished(NamedTuple):
    """How a command ended: its exit status (negative for a signal), whether it ran out of time, what it printed."""

    status: int
    timed_out: bool
    output: str


@dataclass
class Outcome:
    """What became of a stage."""

    state: str
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Stage:
    """A part of the check. `run` gets the seconds that it may take."""

    name: str
    seconds: float
    run: Callable[[float], Outcome]


def say(line: str) -> None:
    """Prints a line at once, so that the output of a run that is ended is complete."""
    print(line, flush=True)


# -- processes -------------------------------------------------------------------------------------------------------


class Processes:
    """Commands, run side by side, that are ended together with everything they started."""

    def __init__(self, logs: Path, environment: dict[str, str]) -> None:
        self.logs = logs
        self.environment = environment
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: Sequence[str], seconds: float, **changes: str) -> Finished:
        """Runs one command for at most `seconds`."""
        return self.run_all({name: command}, seconds, {name: changes})[name]

    def run_all(
        self, commands: dict[str, Sequence[str]], seconds: float, changes: dict[str, dict[str, str]] | None = None
    ) -> dict[str, Finished]:
        """Runs all commands at the same time; after `seconds`, those that still run are interrupted, then killed."""
        end = time.monotonic() + seconds
        started: dict[str, subprocess.Popen[bytes]] = {}
        late: set[str] = set()
        try:
            for name, command in commands.items():
                with open(self.logs / f"{name}.log", "wb") as log:
                    started[name] = subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=self.environment | (changes or {}).get(name, {}),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=_listen,
                    )
            for name, process in started.items():
                if not _ends_by(process, end):
                    late.add(name)
            for name in late:
                _signal(started[name], signal.SIGINT)
            end = time.monotonic() + _GRACE_SECONDS
            for name in late:
                _ends_by(started[name], end)
        finally:
            # Also what a command left behind in its session.
            for process in started.values():
                _signal(process, signal.SIGKILL)
                process.wait()
        return {
            name: Finished(
                process.returncode, name in late, (self.logs / f"{name}.log").read_text("utf-8", errors="replace")
            )
            for name, process in started.items()
        }


def _listen() -> None:
    """In a new process: an interrupt ends it, also where this one was started in the background and ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ends_by(process: subprocess.Popen[bytes], end: float) -> bool:
    try:
        process.wait(timeout=max(end - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def environment_of_stages() -> dict[str, str]:
    """What the processes of the stages see: nothing that changes what is tested, and no network."""
    dropped = ("CI", "TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "PYTEST_ADDOPTS")
    # FastGen's own settings too: it is checked as it comes, captured steps included.
    environment = {
        name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("FASTGEN_")
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return environment | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }


# -- the stages ------------------------------------------------------------------------------------------------------


class Check:
    """The stages, on the GPU that `about` describes."""

    def __init__(self, about: dict[str, Any], processes: Processes, out: Path, workers: int, seed: int) -> None:
        self.about = about
        self.processes = processes
        self.out = out
        self.workers = workers
        self.seed = seed
        self.device = "cuda"
        self.missing = {name for name in (*NEEDED, *OPTIONAL) if not is_installed(name)}

    def stages(self) -> list[Stage]:
        """All of them, in order; the budgets of all but the last are under what the check may take."""
        return [
            Stage("build", 60, self.build),
            Stage("kernels", 100, self.kernels),
            Stage("equivalence", 90, self.equivalence),
            Stage("memcheck", 45, self.memcheck),
            Stage("times", 40, self.times),
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
        if "triton" not in self.missing and not outcome.data["captured"]:
            reasons = outcome.data["left_out"]
            why = max(reasons, key=reasons.__getitem__) if reasons else "nothing was tried"
            return Outcome(NOT_PASSED, f"{outcome.detail}; no decoding step was captured: {why}", outcome.data)
        return outcome

    def tests(self, name: str, paths: Sequence[str], seconds: float, least: float) -> Outcome:
        """Shares the tests of `paths` out to processes; passes if none fails and at least a part of `least` ran."""
        command = [sys.executable, "-m", "pytest", *paths, "--device", self.device, "-q", "--maxfail=20"]
        command += ["-p", "tools.pytest_share", "-p", "no:cacheprovider", f"--hypothesis-seed={self.seed}"]
        stop = time.time() + max(seconds - 2 * _GRACE_SECONDS, 1.0)
        reports = {f"{name}-{k}": self.processes.logs / f"{name}-{k}.jsonl" for k in range(self.workers)}
        changes = {
            key: {
                "FASTGEN_SHARE": f"{k}/{self.workers}",
                "FASTGEN_SHARE_REPORT": str(report),
                "FASTGEN_SHARE_STOP": str(stop),
                "FASTGEN_SHARE_SEED": str(self.seed),
                # As many threads of the host as processes would only get into each other's way.
                "OMP_NUM_THREADS": "1",
            }
            for k, (key, report) in enumerate(reports.items())
        }
        for report in reports.values():
            report.unlink(missing_ok=True)
        done = self.processes.run_all(dict.fromkeys(reports, command), seconds - _GRACE_SECONDS, changes)
        return judge_tests(reports, done, least, self.seed)

    def memcheck(self, seconds: float) -> Outcome:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            return Outcome(SKIPPED, "compute-sanitizer is not installed")
        command = [sanitizer, "--tool", "memcheck", "--leak-check", "no", "--print-limit", "20"]
        command += [sys.executable, "-m", "tools.memcheck"]
        # torch's own allocator would hide a step over the end of a tensor inside a larger block.
        done = self.processes.run("memcheck", command, seconds - _GRACE_SECONDS, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        return judge_memcheck(done)

    def times(self, seconds: float) -> Outcome:
        target = self.out / "kernels.json"
        target.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.kernel_times", "--out", str(target)]
        command += ["--seconds", str(seconds - 2 * _GRACE_SECONDS)]
        done = self.processes.run("times", command, seconds - _GRACE_SECONDS)
        for line in done.output.splitlines():
            say(f"    {line}")
        rows = read_json(target).get("rows", [])
        if done.status != 0 or not rows:
            return Outcome(NOT_PASSED, "out of time" if done.timed_out else last_line(done.output), {"rows": rows})
        return Outcome(PASSED, f"{len(rows)} rows", {"rows": rows})

    def benchmarks(self, seconds: float) -> Outcome:
        end = time.monotonic() + seconds - _GRACE_SECONDS
        base = [sys.executable, "-m", "benchmarks"]
        listed = self.processes.run("benchmarks-list", [*base, "--list"], min(60, seconds - _GRACE_SECONDS))
        groups = choose_workloads([line.split()[0] for line in listed.output.splitlines() if line.strip()])
        if listed.status != 0 or not groups:
            return Outcome(NOT_PASSED, f"no list of workloads: {last_line(listed.output)}")
        results = self.out / "results.json"
        before = ran_by(results)
        states, cut, crashed = [], [], []
        for names in groups:
            while names:
                left = end - time.monotonic()
                if left < _LEAST_SECONDS:
                    cut += names
                    break
                command = [*base, "--device", self.device, "--out", str(self.out.parent), "--only", *names]
                done = self.processes.run(f"benchmarks-{len(states)}", command, left)
                states.append("cut" if done.timed_out else done.status)
                rest = [name for name in names if ran_by(results).get(name) == before.get(name)]
                if done.timed_out:
                    cut += rest
                    break
                # It may have crashed, or left the device unusable: what it has not come to has a process of its own.
                if rest == names:
                    crashed.append(rest.pop(0))
                names = rest
        after = {name: date for name, date in ran_by(results).items() if before.get(name) != date}
        bad = [w["name"] for w in workloads_in(results) if w["name"] in after and w.get("status", "ok") != "ok"]
        bad += crashed
        data = {"done": sorted(after), "left_out": cut, "bad": bad}
        detail = f"{len(after)} workloads" + (f"; no time for {', '.join(cut)}" if cut else "")
        if bad or not after or any(state not in (0, "cut") for state in states):
            return Outcome(NOT_PASSED, detail + (f"; not identical or failed: {', '.join(bad)}" if bad else ""), data)
        return Outcome(PASSED, detail, data)


def judge_tests(reports: dict[str, Path], done: dict[str, Finished], least: float, seed: int) -> Outcome:
    """What the processes of a stage of tests reported, together. A process that wrote nothing has failed."""
    chosen = 0
    count = {"passed": 0, "failed": 0, "skipped": 0}
    failures: list[str] = []
    reasons: dict[str, int] = {}
    captured, left_out = 0, {}
    for name, path in reports.items():
        lines = read_lines(path)
        finished = done[name]
        if not lines or "chosen" not in lines[0]:
            failures.append(f"{name} ended before its first test: {last_line(finished.output)}")
            continue
        chosen += lines[0]["chosen"]
        for line in lines[1:]:
            count[line["outcome"]] += 1
            captured += line.get("captured", 0)
            for reason, calls in line.get("left_out", {}).items():
                left_out[reason] = left_out.get(reason, 0) + calls
            if line["outcome"] == "failed":
                failures.append(f"{line['test']}: {line['reason']}")
            elif line["outcome"] == "skipped":
                reasons[line["reason"]] = reasons.get(line["reason"], 0) + 1
        # 0 all passed, 1 some failed, 2 interrupted or stopped at the end of the time, 5 no test in this share.
        if finished.status not in (0, 1, 2, 5) and not finished.timed_out:
            failures.append(f"{name} ended with status {finished.status}: {last_line(finished.output)}")
    ran = sum(count.values())
    data = {"chosen": chosen, **count, "failures": failures, "skips": reasons, "seed": seed}
    data |= {"captured": captured, "left_out": left_out}
    detail = f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped of {chosen}, seed {seed}"
    if captured:
        detail += f"; {captured} calls with a captured step"
    if ran < chosen:
        detail += f"; {chosen - ran} left out at the end of the time"
    enough = chosen > 0 and ran >= least * chosen and count["passed"] > 0
    return Outcome(PASSED if enough and not failures else NOT_PASSED, detail, data)


def judge_memcheck(done: Finished) -> Outcome:
    """What compute-sanitizer found. Where it cannot watch the device, that is no failure of what it watches."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", done.output)
    checked = re.search(r"^memcheck: (.*)", done.output, re.MULTILINE)
    if found and int(found.group(1)) > 0 and "Device not supported" not in done.output:
        first = re.search(r"========= ((?:Invalid|Out-of|Misaligned|Program).*)", done.output)
        return Outcome(NOT_PASSED, f"{found.group(1)} errors" + (f", first: {first.group(1)}" if first else ""))
    if "Device not supported" in done.output:
        return Outcome(SKIPPED, "compute-sanitizer does not support this device or machine")
    if done.timed_out:
        return Outcome(SKIPPED, "not done in its time; no error until then")
    if done.status == 0 and found and checked:
        return Outcome(PASSED, checked.group(1))
    return Outcome(NOT_PASSED, f"ended with status {done.status}: {last_line(done.output)}")


def choose_workloads(names: Sequence[str]) -> list[list[str]]:
    """The workloads that say something about a GPU, in groups by rank: those made for GPUs come first."""
    first = [name for name in names if name.startswith(("cuda-", "gpu-"))]
    generation = ("no-repeat-", "attention-", "bart-", "t5-", "gpt2-", "llama-")
    return [group for group in (first, [name for name in names if name.startswith(generation)]) if group]


def workloads_in(results: Path) -> list[dict[str, Any]]:
    """The records of a results.json."""
    return read_json(results).get("workloads", [])


def ran_by(results: Path) -> dict[str, str]:
    """When each workload in a results.json was run."""
    return {record["name"]: str(record.get("date")) for record in workloads_in(results)}


# -- the run ---------------------------------------------------------------------------------------------------------


def run_stages(stages: Sequence[Stage], seconds: float, missing: set[str]) -> dict[str, Outcome]:
    """Runs the stages; whatever happens in one of them, the others run, and none of them is late."""
    end = time.monotonic() + seconds
    outcomes: dict[str, Outcome] = {}
    for number, stage in enumerate(stages):
        start = time.monotonic()
        budget = min(stage.seconds, end - start)
        say(f"[{number + 1}/{len(stages)}] {stage.name}: up to {max(budget, 0):.0f} s")
        absent = sorted(name for name in missing if stage.name in NEEDED.get(name, ()))
        if absent:
            outcome = Outcome(NOT_PASSED, f"cannot run without {', '.join(absent)}")
        elif budget < 2 * _GRACE_SECONDS + 2:
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
    """A Markdown table of the stages."""
    lines = [f"# Check on {about['gpu']}", ""]
    lines += [f"- torch {about['torch']}, CUDA {about['cuda']}, commit {about.get('commit') or 'unknown'}", ""]
    lines += ["| stage | result | seconds | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {outcome.state} | {outcome.seconds:.0f} | {outcome.detail.replace('|', '/')} |"
        for name, outcome in outcomes.items()
    ]
    return "\n".join(lines) + "\n"


def probe() -> dict[str, Any] | None:
    """What this Python's torch says about the GPU, found in another process; None without torch."""
    if not is_installed("torch"):
        return None
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"^probe: (.*)", done.stdout, re.MULTILINE)
    if not found:
        return {"torch": "?", "cuda": None, "gpu": None, "error": last_line(done.stderr)}
    return json.loads(found.group(1))


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    beside = os.pathsep.join(str(Path(home, "bin")) for home in homes if home)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one on each line; a last line that was cut off does not count."""
    found = []
    try:
        text = path.read_text("utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="gpu_check.py", description="Checks and measures FastGen on an NVIDIA GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run these stages")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all stages (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a new one)")
    parser.add_argument("--workers", type=int, default=max(2, min(12, (os.cpu_count() or 4) - 2)), metavar="N")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)
    start = time.monotonic()  # a first import of torch takes a while, and counts
    about = probe()
    if about is None:
        say(f"gpu-check: {sys.executable} has no torch; name another one: make gpu-check PYTHON=...")
        return USAGE
    if about["gpu"] is None:
        why = about.get("error") or (f"CUDA {about['cuda']}" if about["cuda"] else "a build without CUDA")
        say(f"gpu-check: no NVIDIA GPU that torch can use (torch {about['torch']}, {why}); nothing was done")
        return NO_GPU

    environment = environment_of_stages()
    named = subprocess.run([sys.executable, "-c", _SLUG], cwd=ROOT, env=environment, capture_output=True, text=True)
    slug = named.stdout.strip() or re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    about["commit"] = commit.stdout.strip() or None
    folder = options.out.resolve() / slug
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    check = Check(about, Processes(folder / "logs", environment), folder, options.workers, seed)
    stages = [stage for stage in check.stages() if not options.only or stage.name in options.only]
    if not stages or set(options.only or ()) - {stage.name for stage in stages}:
        say(f"gpu-check: the stages are {', '.join(stage.name for stage in check.stages())}")
        return USAGE

    say(f"gpu-check: {about['gpu']}, torch {about['torch']}, CUDA {about['cuda']}, Python {sys.version.split()[0]}")
    for name in sorted(check.missing):
        what = OPTIONAL.get(name) or f"no {', '.join(NEEDED[name])}"
        say(f"gpu-check: {name} is not installed: {what}")
    try:
        outcomes = run_stages(stages, options.seconds - (time.monotonic() - start), check.missing)
    except KeyboardInterrupt:
        say("gpu-check: interrupted")
        return INTERRUPTED
    text = summary(about, outcomes)
    data = {"about": about, "missing": sorted(check.missing), "stages": {k: asdict(v) for k, v in outcomes.items()}}
    (folder / "gpu-check.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu-check.md").write_text(text, encoding="utf-8")
    say(f"\n{text}\ngpu-check: results are in {folder}")
    return FAILED if any(outcome.state == NOT_PASSED for outcome in outcomes.values()) else OK


if __name__ == "__main__":
    sys.exit(main())
