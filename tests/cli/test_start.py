"""What happens around a run: closed standard streams, Ctrl-C at any moment, options with odd values."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastgen.pipeline.generation import options as generation_options
from fastgen.settings import _COMMANDS
from fastgen_cli.generate import build_parser, main

pytestmark = pytest.mark.sampled(2)

FAST = ["--num-beams", "2", "--max-new-tokens", "5", "--device", "cpu", "--batch-size", "4"]
UP = "import sys, fastgen_cli.generate as command; print('up', flush=True); sys.exit(command.main())"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("closed", "status", "said"), [((2,), 0, ""), ((0,), 0, "samples/s"), ((1,), 0, "samples/s"), ((0, 1, 2), 0, "")]
)
def test_closed_streams_that_are_not_needed(
    bart: Path, inputs: Path, tmp_path: Path, closed: tuple[int, ...], status: int, said: str
) -> None:
    command = [sys.executable, "-m", "fastgen_cli.generate", bart, inputs, tmp_path / "out.txt", *FAST, "--limit", "4"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, preexec_fn=lambda: [os.close(each) for each in closed]
    )
    assert done.returncode == status
    assert said in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "out.txt").read_bytes().count(b"\n") == 4


@pytest.mark.parametrize(("number", "name"), [(0, "stdin"), (1, "stdout")])
def test_closed_streams_that_are_needed(bart: Path, number: int, name: str) -> None:
    command = [sys.executable, "-m", "fastgen_cli.generate", str(bart), "-", "-"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(number))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"{name} is closed" in done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_during_start_up(bart: Path, inputs: Path, tmp_path: Path, seed: int) -> None:
    """One line and status 130, whichever import it meets."""
    process = subprocess.Popen(
        [sys.executable, "-c", UP, str(bart), str(inputs), str(tmp_path / "out.txt"), *FAST, "--quiet"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    time.sleep(random.Random(seed).uniform(0.01, 2.5))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    if process.returncode == 0:  # it was done before
        return
    assert process.returncode == 130
    assert said.count("\n") == 1 and said.startswith("fastgen-generate: interrupted"), said


@pytest.fixture
def loaded_once(bart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run prepares the same model: reading it takes longest."""
    import copy

    from fastgen.pipeline.generation import RunOptions, loading
    from fastgen.pipeline.loading import choose_device

    loaded = loading.load(RunOptions(model=str(bart), input="-", output="-", device="cpu", quiet=True))

    def again(settings: RunOptions) -> loading.LoadedModel:
        choose_device(settings.device)
        return loading.prepare(copy.deepcopy(loaded.model), copy.deepcopy(loaded.tokenizer), settings)

    monkeypatch.setattr(sys.modules["fastgen.pipeline.generation.run"], "load", again)


ODD = """0 -1 -3 1 2 1.5 nan inf -inf none true x [] [[]] {} [1] [[1,2]] {"a":1} [ 1e3 0.5 never null - ../x
99999999999999999999""".split()
ODD += ["", " ", "é\ud800"]
# These ask for something outside of this process, or for more work or memory than a test has.
LEFT_OUT = set(
    """-h --help --version --debug --no-fastgen --device --workers --trust-remote-code --score-path --report
--dataset-config --dataset-config-name --max-new-tokens --max-length --cache-implementation""".split()
)
OPTIONS = sorted(set(build_parser()._option_string_actions) - LEFT_OUT)


@pytest.mark.usefixtures("loaded_once")
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(ODD) | st.integers(-5, 9).map(str)), max_size=2),
    st.booleans(),
)
@example([("--num-beams", "0")], True)
@example([("--num-return-sequences", "0")], True)
@example([("--seed", "99999999999999999999")], True)
@example([("--prefix", "é\ud800")], True)
@example([("--bad-words-ids", "[[]]")], False)
def test_odd_values_give_a_run_or_one_line(
    bart: Path, tmp_path_factory: pytest.TempPathFactory, options: list[tuple[str, str]], attached: bool
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    source = folder / "in.txt"
    source.write_text("let there be light\n")
    words = [f"{name}={value}" for name, value in options]
    if not attached:
        words = [word for pair in options for word in pair]
    said = folder / "said"
    before = sys.stderr
    with open(said, "w", encoding="utf-8", errors="backslashreplace") as sys.stderr:
        try:
            status = main([str(bart), str(source), str(folder / "out.txt"), "--device", "cpu", "--max-new-tokens", "3",
                           "--workers", "0", *words, "--quiet"])  # fmt: skip
        finally:
            sys.stderr = before
    lines = [line for line in said.read_text().splitlines() if line.startswith("fastgen-generate:")]
    assert status in (0, 1, 2), words
    assert "Traceback" not in said.read_text() and "--debug" not in said.read_text(), (words, said.read_text())
    assert len(lines) == (status > 0), (words, said.read_text())


def test_every_type_of_option_is_fuzzed() -> None:
    assert {"--" + name.replace("_", "-") for name in generation_options.TYPES} - LEFT_OUT <= set(OPTIONS)


WRONG = "weight_dtype (FASTGEN_WEIGHT_DTYPE) is 'int2'; known: fp32, int8, int4, bf16"


def with_a_wrong_setting(*command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FASTGEN_WEIGHT_DTYPE": "int2"}
    return subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "fastgen_cli.generate", "model", "in.txt", "out.txt"],
        ["-m", "fastgen_cli.fairseq", "generate", "model"],
        ["-m", "fastgen"],
        ["-Bmfastgen"],
        ["-m", "fastgen.fairseq", "generate", "-m", "x"],
    ],
)
def test_a_wrong_setting_of_the_environment_is_one_line(words: list[str]) -> None:
    done = with_a_wrong_setting(*words)
    assert (done.returncode, done.stderr) == (2, f"fastgen: {WRONG}\n")


def test_a_wrong_setting_of_the_environment_is_one_line_of_an_installed_command(tmp_path: Path) -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    names = re.findall(r"^(fastgen-[\w-]+) = ", project, re.MULTILINE)
    assert len(names) == 8 and all(name.startswith(_COMMANDS) for name in names)
    (tmp_path / names[0]).write_text("import sys\nfrom fastgen_cli.generate import main\nsys.exit(main())\n")
    done = with_a_wrong_setting(tmp_path / names[0], "--help")
    assert (done.returncode, done.stderr) == (2, f"fastgen: {WRONG}\n")


@pytest.mark.parametrize("run", [["program.py"], ["-m", "program"], ["-m", "program", "fastgen"]])
def test_a_program_with_a_wrong_setting_gets_an_exception(tmp_path: Path, run: list[str]) -> None:
    (tmp_path / "program").mkdir()
    code = "".join(
        f"try:\n    import {module}\nexcept ValueError as error:\n    print(error)\n"
        for module in ("fastgen", "fastgen_cli.generate")
    )
    for name in ("program.py", "program/__init__.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "program" / "__main__.py").touch()
    environment = {**os.environ, "FASTGEN_WEIGHT_DTYPE": "int2"}
    done = subprocess.run([sys.executable, *run], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{WRONG}\n" * 2, "")
