"""The pages of help: the short one begins with examples and fits on two screens, the long one has every option."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation import options as generation_options
from fastgen_cli.generate import parse

COMMANDS = {"generate": "generate", "embed": "encode embed", "classify": "encode classify", "quantize": "quantize"}


def said(name: str, *words: str) -> str:
    command = [sys.executable, "-m", *f"fastgen_cli.{COMMANDS[name]}".split(), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "80"})
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_page(name: str) -> None:
    lines = said(name, "--help").splitlines()
    assert len(lines) < 100 and max(map(len, lines)) <= 120
    assert sum(line.startswith(f"  fastgen-{name} ") for line in lines[:8]) == 2
    assert "--help-all" in lines[-1]


def test_the_long_page_has_every_option() -> None:
    page = said("generate", "--help-all")
    names = [field.name for field in dataclasses.fields(RunOptions) if field.metadata] + list(generation_options.TYPES)
    assert not [name for name in names if f"--{name.replace('_', '-')}" not in page]
    assert "status:" in page


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(name: str, shell: str) -> None:
    pytest.importorskip("shtab")
    script = said(name, "--print-completion", shell)
    assert (f"fastgen-{name}" in script and "--no-fastgen" in script) or name == "quantize"


def test_names_of_columns_may_have_spaces() -> None:
    given, _ = parse(["model", "in.csv", "out.csv", "--keep", 'Product Name, label,"a, b"'])
    assert given["keep"] == ("Product Name", "label", "a, b")
