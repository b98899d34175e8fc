"""The GPU check's own logic, on the CPU: stages and budgets, what is judged how, and what it says without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import gpu_check, processes
from tools.gpu_check import NOT_PASSED, PASSED, SKIPPED, Outcome, Stage
from tools.processes import Finished, Processes

ROOT = Path(__file__).parents[1]


@pytest.fixture
def started(tmp_path):
    return Processes(tmp_path / "logs", gpu_check.environment_of_stages())


@pytest.fixture
def make_check(started, tmp_path):
    return lambda: gpu_check.Check({"architecture": "sm_90"}, started, tmp_path / "a-gpu", 2, 5)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    for module in (gpu_check, processes):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(gpu_check, "_LEAST_SECONDS", 1.0)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def passing(name: str, seconds: float = 100, detail: str = "") -> Stage:
    return Stage(name, seconds, lambda budget: Outcome(PASSED, detail))


def failing(name: str, error: BaseException) -> Stage:
    def run(seconds):
        raise error

    return Stage(name, 100, run)


class TestWithoutGpu:
    def test_says_so_in_one_line_with_status_3(self, programs):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        done = subprocess.run([programs / "python", "-m", "tools.gpu_check"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 3
        assert done.stdout.count("\n") == 1 and done.stdout.startswith("gpu-check: no NVIDIA GPU")
        assert torch.__version__ in done.stdout and done.stderr == ""

    def test_without_torch(self, monkeypatch, capsys):
        monkeypatch.setattr(gpu_check, "is_installed", lambda name: name != "torch")
        assert gpu_check.main([]) == 2
        assert "PYTHON=" in capsys.readouterr().out


class TestWithAnImaginedGpu:
    @pytest.fixture
    def check(self, monkeypatch, tmp_path):
        def run(stages, *arguments):
            about = {"gpu": "A GPU", "torch": "2", "cuda": "13", "architecture": "sm_90", "slug": "a-gpu"}
            monkeypatch.setattr(gpu_check, "_PROBE", f"print('probe: ' + {json.dumps(about)!r})")
            monkeypatch.setattr(gpu_check.Check, "stages", lambda self: stages)
            status = gpu_check.main(["--out", str(tmp_path), *arguments])
            written = tmp_path / "a-gpu" / "gpu-check.json"
            return status, json.loads(written.read_text()) if written.exists() else None

        return run

    def test_a_failing_stage_does_not_cost_the_rest(self, check, tmp_path, capsys):
        stages = [
            Stage("build", 100, lambda seconds: Outcome(NOT_PASSED, "no compiler")),
            failing("kernels", OSError("disk full")),
            passing("memcheck", detail="no error"),
        ]
        status, written = check(stages)
        assert status == 1
        assert [stage["state"] for stage in written["stages"].values()] == [NOT_PASSED, NOT_PASSED, PASSED]
        assert written["stages"]["kernels"]["detail"] == "OSError: disk full"
        table = (tmp_path / "a-gpu" / "gpu-check.md").read_text()
        assert "| build | FAILED | 0 | no compiler |" in table and table in capsys.readouterr().out

    def test_an_interruption(self, check):
        assert check([failing("memcheck", KeyboardInterrupt())])[0] == 130


def test_the_stages_fit_into_nine_minutes(make_check):
    stages = make_check().stages()
    assert stages[-1].name == "benchmarks" and gpu_check.TOTAL_SECONDS <= 530
    # What is left for the benchmarks if everything before them needs all of its time.
    assert gpu_check.TOTAL_SECONDS - sum(stage.seconds for stage in stages[:-1]) >= 120


def test_a_stage_gets_its_budget_and_never_more_than_is_left():
    given = {}

    def stage(name, seconds):
        return Stage(name, seconds, lambda budget: Outcome(PASSED, data=given.update({name: budget}) or {}))

    gpu_check.run_stages([stage("a", 30), stage("b", 1000)], 200)
    assert given["a"] == pytest.approx(30) and given["b"] == pytest.approx(200, abs=1)
    outcome = gpu_check.run_stages([passing("a", 30)], 1)["a"]
    assert (outcome.state, outcome.detail) == (NOT_PASSED, "no time was left")


class TestProcesses:
    def test_output_and_status(self, started):
        done = started.run("some", python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"), 60)
        assert (done.status, done.timed_out) == (7, False)
        assert sorted(done.output.split()) == ["err", "out"]

    @pytest.mark.long
    def test_one_that_is_late_is_interrupted(self, started):
        code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('asked to end')"
        done = started.run("late", python(code), 8)
        assert done.timed_out and "asked to end" in done.output

    def test_one_that_does_not_listen_is_killed_with_its_children(self, started, tmp_path):
        child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
        code = (
            "import signal, subprocess, sys\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
            "child.wait()"
        )
        done = started.run("deaf", python(code), 3)
        assert done.timed_out and done.status == -9
        status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
        for _ in range(50):
            if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.1)
        pytest.fail("the child is still there")


class TestTests:
    """The tests of a stage, in two processes with the plugin."""

    TESTS = """
import pytest
@pytest.mark.parametrize("k", range(12))
def test_number(k):
    assert k != {bad}
def test_left_out():
    pytest.skip("for a reason")
"""

    @pytest.fixture
    def judged(self, make_check, started, tmp_path):
        # Plugins of the environment that the stages have no use for take seconds to import, in every process.
        plugins = "xdist.plugin,_hypothesis_pytestplugin"
        started.environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugins}

        def run(text, budget=60.0):
            file = tmp_path / "test_it.py"
            file.write_text(text)
            (tmp_path / "conftest.py").write_text(
                "def pytest_addoption(parser):\n    parser.addoption('--device', default='cpu')\n"
            )
            (tmp_path / "pytest.ini").write_text("[pytest]\n")
            check = make_check()
            check.device = "cpu"
            return check.tests("some", ["-c", str(tmp_path / "pytest.ini"), str(file)], budget, 1.0)

        return run

    def test_every_test_runs_once_and_a_failure_is_named(self, judged):
        outcome = judged(self.TESTS.format(bad=3))
        assert outcome.state == NOT_PASSED
        counts = [outcome.data[name] for name in ("chosen", "passed", "failed", "skipped")]
        assert counts == [13, 11, 1, 1] and outcome.data["skips"] == {"for a reason": 1}
        assert len(outcome.data["failures"]) == 1 and "test_number[3]" in outcome.data["failures"][0]

    @pytest.mark.long
    def test_tests_are_left_out_at_the_end_of_the_time(self, judged):
        """Which comes with the first test of each process."""
        outcome = judged(
            "import os, pytest\n"
            "@pytest.mark.parametrize('k', range(90))\n"
            "def test_number(k):\n    os.environ['FASTGEN_GPU_TESTS_STOP'] = '0'\n"
        )
        assert outcome.state == NOT_PASSED and "left out at the end of the time" in outcome.detail, outcome
        assert outcome.data["chosen"] == 90 and outcome.data["passed"] == 2 and outcome.data["failures"] == []

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("text", "failures"),
        [
            ("import nothing_of_that_name", 1),
            ("import os\ndef test_crash():\n    os._exit(9)\n", 1),
            # An error before a test or after it counts once.
            (
                "import pytest\n"
                "@pytest.fixture\ndef before():\n    raise ValueError('before')\n"
                "@pytest.fixture\ndef after():\n    yield\n    raise ValueError('after')\n"
                "def test_one(before): pass\n"
                "def test_two(after): pass\n",
                2,
            ),
        ],
    )
    def test_what_breaks_is_a_failure(self, judged, text, failures):
        outcome = judged(text)
        assert outcome.state == NOT_PASSED and len(outcome.data["failures"]) == failures, outcome


class TestEquivalence:
    """That captured steps are what was tested."""

    @pytest.mark.parametrize(
        ("captured", "left_out", "triton", "problem"),
        [
            (3, {"a streamer": 9}, True, None),
            (0, {"a streamer": 1, "Triton is too old": 8}, True, "no decoding step was captured: Triton is too old"),
            (0, {}, True, "nothing was tried"),
            (0, {}, False, None),
        ],
    )
    def test_judged(self, make_check, monkeypatch, captured, left_out, triton, problem):
        data = {"captured": captured, "left_out": left_out}
        monkeypatch.setattr(gpu_check.Check, "tests", lambda *a, **k: Outcome(PASSED, "9 passed", data))
        monkeypatch.setattr(gpu_check, "is_installed", lambda name: triton)
        outcome = make_check().equivalence(60)
        assert outcome.state == (PASSED if problem is None else NOT_PASSED) and (problem or "") in outcome.detail

    def test_the_files_are_there(self):
        for path in (*gpu_check.KERNEL_TESTS, *gpu_check.EQUIVALENCE_TESTS):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("script", "seconds", "outcome"),
    [
        (
            "assert (os.environ['FASTGEN_CUDA_ARCH'], os.environ['FASTGEN_DEVICES']) == ('sm_90', 'cuda')\n"
            "open('fastgen/ops/libfastgen_cuda.so', 'x')",
            60.0,
            Outcome(PASSED, "csrc for sm_90"),
        ),
        (
            "print('fastgen: there is no nvcc', file=sys.stderr); print('done')",
            60.0,
            Outcome(NOT_PASSED, "there is no nvcc"),
        ),
        ("time.sleep(60)", 1.0, Outcome(NOT_PASSED, "not done after 1 s")),
    ],
)
def test_build(make_check, tmp_path, monkeypatch, script, seconds, outcome):
    """For this GPU alone; with a stand-in for setup.py, beside the library of an earlier build."""
    (tmp_path / "fastgen/ops").mkdir(parents=True)
    (tmp_path / "fastgen/ops/libfastgen_cuda.so").touch()
    (tmp_path / "setup.py").write_text(f"import os, sys, time\n{script}")
    for module in (gpu_check, processes):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    assert make_check().build(seconds) == outcome


@pytest.mark.parametrize(
    ("output", "status", "timed_out", "state"),
    [
        ("memcheck: 24 calls\n========= ERROR SUMMARY: 0 errors", 0, False, PASSED),
        ("========= Invalid __global__ write of size 4\n========= ERROR SUMMARY: 3 errors", 0, False, NOT_PASSED),
        ("========= Error: Device not supported.\n========= ERROR SUMMARY: 2 errors", 1, False, SKIPPED),
        ("========= COMPUTE-SANITIZER", -9, True, SKIPPED),
        ("memcheck: no CUDA kernel to watch\n========= ERROR SUMMARY: 0 errors", 1, False, NOT_PASSED),
        ("ImportError: no such thing", 1, False, NOT_PASSED),
    ],
)
def test_what_the_sanitizer_says(output, status, timed_out, state):
    assert gpu_check.judge_memcheck(Finished(status, timed_out, output)).state == state


@pytest.mark.long
def test_kernels_that_the_sanitizer_watches():
    from tools.memcheck import check_triton

    check_triton("cpu")


def test_each_workload_has_a_process_of_its_own(make_check, started, tmp_path, monkeypatch):
    stand_in = tmp_path / "benchmarks"
    stand_in.mkdir()
    (stand_in / "__main__.py").write_text(
        "import os, sys, time\n"
        "if '--list' in sys.argv:\n"
        "    print('import  Import', *(f'gpu-{name}  GPU' for name in 'abcd'), sep='\\n'); sys.exit()\n"
        "name = sys.argv[-1]\n"
        "if name == 'gpu-b': os._exit(9)\n"
        "if name == 'gpu-d': time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu_check, "_WORKLOAD_SECONDS", 2.0)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    started.environment["PYTHONPATH"] = str(tmp_path)
    outcome = make_check().benchmarks(60)
    assert outcome.state == NOT_PASSED
    assert outcome.data == {"done": ["gpu-a", "gpu-c"], "left_out": ["gpu-d"], "bad": ["gpu-b"]}
    assert make_check().benchmarks(0.4).state == NOT_PASSED
