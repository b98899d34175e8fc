"""Output that cannot be printed and interrupts: errors on one line, and nothing finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from fastgen_cli import fairseq as commands
from tests.fairseq.commands.world import BASE, ROOT, lines, run


def into(stdout: str) -> dict[str, Any]:
    """Options of `subprocess` for a standard output that is closed, or a file on a full disk."""
    if stdout == "closed":
        return {"preexec_fn": lambda: os.close(1)}
    return {"preexec_fn": lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("stdout", "said"), [("closed", "stdout is closed"), ("full", "cannot write standard output: No space left")]
)
@pytest.mark.parametrize("program", [commands.GENERATE, commands.INTERACTIVE, "fastgen-generate"])
def test_output_that_cannot_be_printed_is_one_line(world, program, stdout, said, programs):
    words = [world.data, "--path", world.model, *BASE]
    if program == commands.INTERACTIVE:
        words += ["--input", world.folder / "valid.de", "--buffer-size", 8]
    if program == "fastgen-generate":
        words = [world.model, world.data, "-", *BASE]
    module = "fastgen_cli.generate" if program == "fastgen-generate" else "fastgen_cli.fairseq"
    words = words if program == "fastgen-generate" else [program.split("-")[1], *words]
    # What is closed before the interpreter starts needs one of its own.
    python = sys.executable if stdout == "closed" else programs / "python"
    done = run(module, *words, program=python, status=2, **into(stdout))
    found = [line for line in done.stderr.splitlines() if line.startswith(f"{program}: ")]
    assert len(found) == 1 and said in found[0] and "--debug" not in found[0]
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_closed_standard_output_that_is_not_needed(world, tmp_path):
    words = [world.data, "--path", world.model, *BASE, "--results-path", tmp_path, "--gen-subset", "valid"]
    run("fastgen_cli.fairseq", "generate", *words, **into("closed"))
    assert len(lines((tmp_path / "generate-valid.txt").read_text())) == 10 * 5 + 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["generate", "interactive", "eval_lm"])
def test_ctrl_c_during_start_up_is_one_line(world, name):
    """Whichever import it meets."""
    code = "import sys, fastgen_cli.fairseq as command; print('up', flush=True); sys.exit(command.%s())"
    for delay in (0.05, 0.5, 1.2):
        with subprocess.Popen(
            [sys.executable, "-c", code % name, str(world.data), "--path", str(world.model), "--cpu"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:  # fmt: skip
            assert process.stdout.readline() == "up\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=300)[1]
        assert process.returncode == 130, said
        assert "Traceback" not in said and said.splitlines()[-1].endswith(": interrupted"), said


@pytest.mark.parametrize("program", [commands.GENERATE, "fastgen-generate"])
def test_an_interrupt_loses_no_finished_line(world, tmp_path, program, programs):
    """What the model had finished when it was interrupted is printed, every sentence of it to the last line."""
    options = [*BASE, "--gen-subset", "train", "--batch-size", 2, "--max-len-b", 100, "--min-len", 100]
    if program == "fastgen-generate":
        results = tmp_path / "out.txt.partial"
        words = ["fastgen_cli.generate", world.model, world.data, tmp_path / "out.txt"]
    else:
        results = tmp_path / "generate-train.txt"
        words = ["fastgen_cli.fairseq", "generate", world.data, "--path", world.model, "--results-path", tmp_path]
    command = [programs / "python", "-m", *words, *options]
    with subprocess.Popen(
        [*map(str, command)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has interrupts ignored, which processes inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 600
        while not results.exists() or results.read_text().count("\nP-") < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        messages = process.stderr.read()
        assert process.wait(timeout=300) == 130
    assert messages.splitlines()[-1] == f"{program}: interrupted"
    assert (f"what was finished is in {results}" in messages) == (program == "fastgen-generate")
    assert "Traceback" not in messages
    text = results.read_text()
    assert text.endswith("\n")
    found = lines(text)
    assert len(found) % 5 == 0 and 15 <= len(found) < 400 * 5
    ids = [{line.partition("\t")[0][2:] for line in found if line[0] == kind} for kind in "STHDP"]
    assert all(each == ids[0] for each in ids) and len(ids[0]) == len(found) // 5
