"""The GPU check's own logic, on the CPU: stages and budgets, what is judged how, and what it says without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import gpu_check
from tools.gpu_check import NOT_PASSED, PASSED, SKIPPED, Finished, Outcome, Processes, Stage

ROOT = Path(__file__).parents[1]


@pytest.fixture
def processes(tmp_path):
    return Processes(tmp_path / "logs", gpu_check.environment_of_stages())


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(gpu_check, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(gpu_check, "_LEAST_SECONDS", 1.0)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class TestWithoutGpu:
    def test_says_so_in_one_line_with_status_3(self):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        done = subprocess.run([sys.executable, "tools/gpu_check.py"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 3
        assert done.stdout.count("\n") == 1 and done.stdout.startswith("gpu-check: no NVIDIA GPU")
        assert torch.__version__ in done.stdout and done.stderr == ""

    def test_a_device_that_cannot_be_used_is_none(self, monkeypatch, capsys):
        monkeypatch.setattr(gpu_check, "_PROBE", "raise RuntimeError('the driver is too old')")
        assert gpu_check.main([]) == 3
        assert "the driver is too old" in capsys.readouterr().out

    def test_without_torch(self, monkeypatch, capsys):
        monkeypatch.setattr(gpu_check, "is_installed", lambda name: name != "torch")
        assert gpu_check.main([]) == 2
        assert "PYTHON=" in capsys.readouterr().out


class TestWithAnImaginedGpu:
    """The whole run, with stages that need no GPU."""

    @pytest.fixture
    def check(self, monkeypatch, tmp_path):
        def run(stages, *arguments):
            about = {"gpu": "A GPU", "torch": "2", "cuda": "13", "architecture": "sm_90"}
            monkeypatch.setattr(gpu_check, "_PROBE", f"print('probe: ' + {json.dumps(about)!r})")
            monkeypatch.setattr(gpu_check, "_SLUG", "print('a-gpu')")
            monkeypatch.setattr(gpu_check.Check, "stages", lambda self: stages)
            status = gpu_check.main(["--out", str(tmp_path), *arguments])
            return status, gpu_check.read_json(tmp_path / "a-gpu" / "gpu-check.json")

        return run

    def test_a_failing_stage_does_not_cost_the_rest(self, check, tmp_path, capsys):
        def broken(seconds):
            raise OSError("disk full")

        stages = [
            Stage("build", 100, lambda seconds: Outcome(NOT_PASSED, "no compiler")),
            Stage("kernels", 100, broken),
            Stage("times", 100, lambda seconds: Outcome(PASSED, "3 rows")),
        ]
        status, written = check(stages)
        assert status == 1
        assert [stage["state"] for stage in written["stages"].values()] == [NOT_PASSED, NOT_PASSED, PASSED]
        assert written["stages"]["kernels"]["detail"] == "OSError: disk full"
        table = (tmp_path / "a-gpu" / "gpu-check.md").read_text()
        assert "| build | FAILED | 0 | no compiler |" in table and table in capsys.readouterr().out

    def test_all_passed_or_skipped(self, check):
        stages = [
            Stage("memcheck", 100, lambda seconds: Outcome(SKIPPED, "not installed")),
            Stage("times", 100, lambda seconds: Outcome(PASSED)),
        ]
        assert check(stages)[0] == 0

    def test_only_some_stages(self, check, capsys):
        stages = [Stage(name, 100, lambda seconds: Outcome(PASSED)) for name in ("build", "times")]
        status, written = check(stages, "--only", "times")
        assert status == 0 and list(written["stages"]) == ["times"]
        assert check(stages, "--only", "nonsense")[0] == 2
        assert "the stages are build, times" in capsys.readouterr().out

    def test_what_is_missing_costs_a_line_or_its_stage(self, check, monkeypatch, capsys):
        installed = gpu_check.is_installed
        monkeypatch.setattr(
            gpu_check, "is_installed", lambda name: name not in ("datasets", "transformers") and installed(name)
        )
        stages = [Stage(name, 100, lambda seconds: Outcome(PASSED)) for name in ("times", "benchmarks")]
        status, written = check(stages)
        said = capsys.readouterr().out
        assert "datasets is not installed: data sets by name" in said
        assert status == 1 and written["stages"]["times"]["state"] == PASSED
        assert written["stages"]["benchmarks"]["detail"] == "cannot run without transformers"

    def test_an_interruption(self, check):
        def interrupted(seconds):
            raise KeyboardInterrupt

        assert check([Stage("times", 100, interrupted)])[0] == 130


class TestBudgets:
    def test_the_stages_fit_into_nine_minutes(self, processes, tmp_path):
        stages = gpu_check.Check({"architecture": "sm_90"}, processes, tmp_path, 2, 0).stages()
        assert [stage.name for stage in stages][-1] == "benchmarks"
        # What is left for the benchmarks if everything before them needs all of its time.
        assert gpu_check.TOTAL_SECONDS - sum(stage.seconds for stage in stages[:-1]) >= 120
        assert gpu_check.TOTAL_SECONDS <= 530

    def test_a_stage_gets_its_budget_and_never_more_than_is_left(self):
        given = {}

        def stage(name, seconds):
            return Stage(name, seconds, lambda budget: Outcome(PASSED, data=given.update({name: budget}) or {}))

        gpu_check.run_stages([stage("a", 30), stage("b", 1000)], 200, set())
        assert given["a"] == pytest.approx(30) and given["b"] == pytest.approx(200, abs=1)

    def test_no_time_left(self):
        outcome = gpu_check.run_stages([Stage("a", 30, lambda seconds: Outcome(PASSED))], 1, set())["a"]
        assert (outcome.state, outcome.detail) == (NOT_PASSED, "no time was left")


class TestProcesses:
    def test_output_and_status(self, processes):
        done = processes.run("some", python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"), 60)
        assert (done.status, done.timed_out) == (7, False)
        assert sorted(done.output.split()) == ["err", "out"]

    @pytest.mark.long
    def test_one_that_is_late_is_interrupted_and_the_others_are_not(self, processes):
        commands = {
            "late": python("import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('asked to end')"),
            "quick": python("print('done')"),
        }
        start = time.monotonic()
        done = processes.run_all(commands, 8)
        assert time.monotonic() - start < 50
        assert done["late"].timed_out and "asked to end" in done["late"].output
        assert (done["quick"].status, done["quick"].timed_out) == (0, False)

    def test_one_that_does_not_listen_is_killed_with_its_children(self, processes, tmp_path):
        child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
        code = (
            "import signal, subprocess, sys\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
            "child.wait()"
        )
        done = processes.run("deaf", python(code), 6)
        assert done.timed_out and done.status == -9
        pid = int((tmp_path / "pid").read_text())
        for _ in range(50):
            try:
                os.kill(pid, 0)
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (ProcessLookupError, FileNotFoundError):
                return
            if state == "Z":
                return
            time.sleep(0.1)
        pytest.fail("the child is still there")

    def test_what_changes_the_tests_is_not_passed_on(self, monkeypatch):
        monkeypatch.setenv("FASTGEN_NO_EXT", "1")
        monkeypatch.setenv("CI", "1")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("FASTGEN_CAPTURED_STEP", "never")
        environment = gpu_check.environment_of_stages()
        assert not {"CI", "TRITON_INTERPRET"} & set(environment)
        assert not [name for name in environment if name.startswith("FASTGEN_")]
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert str(ROOT) in environment["PYTHONPATH"].split(os.pathsep)


class TestShares:
    """The tests of a stage, shared out to processes by the plugin."""

    TESTS = """
import pytest, time
@pytest.mark.parametrize("k", range(12))
def test_number(k):
    time.sleep({seconds})
    assert k != {bad}
def test_left_out():
    pytest.skip("for a reason")
"""

    @pytest.fixture
    def judged(self, processes, tmp_path):
        def run(seconds=0.0, bad=-1, least=1.0, budget=60.0, text=None, device="cpu"):
            file = tmp_path / "test_it.py"
            file.write_text(text or self.TESTS.format(seconds=seconds, bad=bad))
            (tmp_path / "conftest.py").write_text(
                "def pytest_addoption(parser):\n    parser.addoption('--device', default='cpu')\n"
            )
            (tmp_path / "pytest.ini").write_text("[pytest]\n")
            check = gpu_check.Check({"architecture": "sm_90"}, processes, tmp_path, 2, 5)
            check.device = device
            return check.tests("some", ["-c", str(tmp_path / "pytest.ini"), str(file)], budget, least)

        return run

    def test_every_test_runs_once(self, judged):
        outcome = judged()
        assert outcome.state == PASSED
        assert (outcome.data["chosen"], outcome.data["passed"], outcome.data["skipped"]) == (13, 12, 1)
        assert outcome.data["skips"] == {"for a reason": 1}

    @pytest.mark.long
    def test_on_a_gpu_those_that_do_something_there(self, judged):
        text = (
            "import pytest\n"
            "@pytest.fixture\ndef device(request):\n    return request.config.getoption('--device')\n"
            "def test_here():\n    pass\n"
            "def test_there(device):\n    assert device == 'a-gpu'\n"
        )
        outcome = judged(text=text, device="a-gpu")
        assert outcome.state == PASSED and (outcome.data["chosen"], outcome.data["passed"]) == (1, 1)

    def test_a_failure_is_named(self, judged):
        outcome = judged(bad=3)
        assert outcome.state == NOT_PASSED
        assert (outcome.data["passed"], outcome.data["failed"]) == (11, 1)
        assert len(outcome.data["failures"]) == 1 and "test_number[3]" in outcome.data["failures"][0]

    @pytest.mark.long
    def test_the_time_is_over(self, judged):
        outcome = judged(seconds=3.0, least=0.1, budget=14.0)
        assert outcome.state == PASSED
        assert 0 < outcome.data["passed"] < 12
        assert "left out at the end of the time" in outcome.detail

    @pytest.mark.long
    def test_too_few_ran(self, judged):
        assert judged(seconds=2.0, least=0.9, budget=7.0).state == NOT_PASSED

    @pytest.mark.long
    def test_a_file_that_cannot_be_read(self, judged):
        outcome = judged(text="import nothing_of_that_name")
        assert outcome.state == NOT_PASSED

    @pytest.mark.long
    def test_a_process_that_crashes(self, judged):
        outcome = judged(text="import os\ndef test_crash():\n    os._exit(9)\n")
        assert outcome.state == NOT_PASSED
        assert any("status 9" in failure for failure in outcome.data["failures"])

    @pytest.mark.long
    def test_an_error_before_and_after_a_test_counts_once(self, judged):
        text = (
            "import pytest\n"
            "@pytest.fixture\ndef before():\n    raise ValueError('before')\n"
            "@pytest.fixture\ndef after():\n    yield\n    raise ValueError('after')\n"
            "def test_one(before): pass\n"
            "def test_two(after): pass\n"
        )
        outcome = judged(text=text)
        assert outcome.state == NOT_PASSED
        assert len(outcome.data["failures"]) == 2


class TestEquivalence:
    """That captured steps are what was tested."""

    @pytest.fixture
    def judged(self, processes, tmp_path, monkeypatch):
        def run(captured, left_out=None, missing=()):
            data = {"captured": captured, "left_out": left_out or {}}
            monkeypatch.setattr(gpu_check.Check, "tests", lambda *a, **k: Outcome(PASSED, "9 passed", data))
            check = gpu_check.Check({"architecture": "sm_90"}, processes, tmp_path, 2, 0)
            check.missing = set(missing)
            return check.equivalence(60)

        return run

    def test_some_were(self, judged):
        assert judged(3, {"a streamer": 9}).state == PASSED

    def test_none_was(self, judged):
        outcome = judged(0, {"a streamer": 1, "Triton is too old": 8})
        assert outcome.state == NOT_PASSED and "no decoding step was captured: Triton is too old" in outcome.detail
        assert "nothing was tried" in judged(0).detail

    def test_none_can_be(self, judged):
        assert judged(0, missing=["triton"]).state == PASSED

    def test_they_are_counted_over_all_tests(self, tmp_path):
        reports = {}
        for number in range(2):
            path = reports[f"e-{number}"] = tmp_path / f"{number}.jsonl"
            lines = [
                {"chosen": 2},
                {"test": "a", "outcome": "passed", "reason": "", "captured": 2},
                {"test": "b", "outcome": "passed", "reason": "", "left_out": {"a streamer": 3}},
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        outcome = gpu_check.judge_tests(reports, dict.fromkeys(reports, Finished(0, False, "")), 1.0, 7)
        assert outcome.data["captured"] == 4 and outcome.data["left_out"] == {"a streamer": 6}
        assert "4 calls with a captured step" in outcome.detail

    def test_the_plugin_counts_them(self, monkeypatch):
        from fastgen import counters
        from tools import pytest_share

        for name in ("count_accelerated", "count_not_used"):
            monkeypatch.setattr(counters, name, getattr(counters, name))
        pytest_share._take_captured()
        pytest_share.watch_captured_steps()
        counters.count_accelerated("transformers.captured_step")
        counters.count_accelerated("transformers.generate")
        counters.reset()
        counters.count_not_used("transformers.captured_step", "a streamer")
        assert pytest_share._take_captured() == {"captured": 1, "left_out": {"a streamer": 1}}
        assert pytest_share._take_captured() == {}

    def test_the_files_are_there(self):
        for path in (*gpu_check.KERNEL_TESTS, *gpu_check.EQUIVALENCE_TESTS):
            assert (ROOT / path).exists(), path


class TestBuild:
    """The stage, with a stand-in for setup.py."""

    @pytest.fixture
    def built(self, processes, tmp_path, monkeypatch):
        def run(script, seconds=60.0):
            library = tmp_path / "fastgen" / "ops" / "libfastgen_cuda.so"
            library.parent.mkdir(parents=True)
            library.write_text("of an earlier build")
            (tmp_path / "setup.py").write_text(f"import os, sys, time\nlibrary = {str(library)!r}\n{script}")
            monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
            return gpu_check.Check({"architecture": "sm_90"}, processes, tmp_path, 2, 0).build(seconds)

        return run

    def test_for_this_gpu_alone(self, built):
        outcome = built(
            "assert (os.environ['FASTGEN_CUDA_ARCH'], os.environ['FASTGEN_DEVICES']) == ('sm_90', 'cuda')\n"
            "open(library, 'x')"
        )
        assert (outcome.state, outcome.detail) == (PASSED, "csrc for sm_90")

    def test_what_setup_says_is_the_reason(self, built):
        outcome = built("print('fastgen: there is no nvcc', file=sys.stderr); print('done')")
        assert (outcome.state, outcome.detail) == (NOT_PASSED, "there is no nvcc")

    def test_too_slow(self, built):
        assert built("time.sleep(60)", 1.0).detail == "not done after 1 s"


class TestMemcheck:
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
    def test_judged(self, output, status, timed_out, state):
        assert gpu_check.judge_memcheck(Finished(status, timed_out, output)).state == state

    def test_kernels_that_it_watches(self):
        """On the CPU: the calls are right, and so are the results."""
        from tools.memcheck import check_triton

        check_triton("cpu")


class TestBenchmarks:
    LISTED = "if '--list' in sys.argv:\n    print('bart-base-b4  BART'); print('import  Import'); sys.exit()\n"

    def check(self, processes, tmp_path, monkeypatch, script, listed=LISTED):
        """The stage, with a stand-in for `python -m benchmarks`."""
        folder = tmp_path / "a-gpu"
        folder.mkdir()
        stand_in = tmp_path / "benchmarks"
        stand_in.mkdir()
        (stand_in / "__main__.py").write_text(
            "import json, sys, time\n"
            f"folder = {str(folder)!r}\n" + listed + "def done(name, status='ok'):\n"
            "    record = {'name': name, 'status': status, 'date': '2020'}\n"
            "    open(folder + '/results.json', 'w').write(json.dumps({'workloads': [record]}))\n" + script
        )
        monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
        return gpu_check.Check({"architecture": "sm_90"}, processes, folder, 2, 0)

    def test_all_done(self, processes, tmp_path, monkeypatch):
        check = self.check(processes, tmp_path, monkeypatch, "done('bart-base-b4')")
        processes.environment["PYTHONPATH"] = str(tmp_path)
        outcome = check.benchmarks(60)
        assert outcome.state == PASSED, outcome
        assert outcome.data == {"done": ["bart-base-b4"], "left_out": [], "bad": []}

    def test_not_identical(self, processes, tmp_path, monkeypatch):
        check = self.check(processes, tmp_path, monkeypatch, "done('bart-base-b4', 'not identical'); sys.exit(1)")
        processes.environment["PYTHONPATH"] = str(tmp_path)
        outcome = check.benchmarks(60)
        assert outcome.state == NOT_PASSED and outcome.data["bad"] == ["bart-base-b4"]

    def test_cut_off_by_the_budget_keeps_what_was_done(self, processes, tmp_path, monkeypatch):
        script = "done('bart-base-b4')\ntime.sleep(60)"
        check = self.check(processes, tmp_path, monkeypatch, script)
        processes.environment["PYTHONPATH"] = str(tmp_path)
        outcome = check.benchmarks(4)
        assert outcome.state == PASSED and outcome.data["done"] == ["bart-base-b4"]

    def test_a_crash_costs_the_workload_alone(self, processes, tmp_path, monkeypatch):
        script = (
            "import os\n"
            "if '--list' in sys.argv:\n    print('gpu-a A'); print('gpu-b B'); print('gpu-c C'); sys.exit()\n"
            "def done(name):\n"
            "    path = folder + '/results.json'\n"
            "    records = json.load(open(path))['workloads'] if os.path.exists(path) else []\n"
            "    record = {'name': name, 'status': 'ok', 'date': '2020'}\n"
            "    open(path, 'w').write(json.dumps({'workloads': [*records, record]}))\n"
            "for name in sys.argv[sys.argv.index('--only') + 1:]:\n"
            "    if name == 'gpu-b':\n        os._exit(9)\n"
            "    done(name)\n"
        )
        check = self.check(processes, tmp_path, monkeypatch, script, listed="")
        processes.environment["PYTHONPATH"] = str(tmp_path)
        outcome = check.benchmarks(60)
        assert outcome.state == NOT_PASSED
        assert outcome.data == {"done": ["gpu-a", "gpu-c"], "left_out": [], "bad": ["gpu-b"]}

    def test_those_made_for_a_gpu_come_first(self):
        names = ["bart-base", "import", "cuda-bart-large", "pipeline-2000", "t5-base"]
        assert gpu_check.choose_workloads(names) == [["cuda-bart-large"], ["bart-base", "t5-base"]]

    def test_the_workloads_that_there_are(self):
        from benchmarks.workloads import all_workloads

        first, second = gpu_check.choose_workloads([workload.name for workload in all_workloads()])
        assert first == [workload.name for workload in all_workloads() if workload.needs_gpu]
        assert first[0] == "gpu-bart-large-b32" and "bart-base-b16-s1024" in second


class TestKernelTimes:
    def test_every_row_is_checked_and_timed(self, tmp_path, capsys):
        """Small, on the CPU, where the references take the place of the kernels."""
        code = f"import sys; from benchmarks.kernel_times import main; sys.exit(main({self.arguments(tmp_path)!r}))"
        environment = gpu_check.environment_of_stages()
        done = subprocess.run(python(code), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads((tmp_path / "kernels.json").read_text())
        assert len(found["rows"]) == 15 and found["copy_bytes_per_second"] > 0
        assert all(row["microseconds"] > 0 and row["error"] < 1e-4 for row in found["rows"])

    def arguments(self, folder):
        return ["--device", "cpu", "--small", "--out", str(folder / "kernels.json")]

    def test_a_wrong_kernel_is_a_failure(self, tmp_path, capsys, monkeypatch):
        from benchmarks import kernel_times

        wrong = kernel_times.Case("wrong", lambda: (lambda: torch.ones(3), lambda: torch.zeros(3)), 1)
        monkeypatch.setattr(kernel_times, "cases", lambda device, small: iter([wrong]))
        assert kernel_times.main(self.arguments(tmp_path)) == 1
        assert "wrong: FAILED: RuntimeError: wrong: off by" in capsys.readouterr().out
