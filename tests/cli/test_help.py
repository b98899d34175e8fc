"""The pages of help: the short one begins with examples and fits on two screens, the long one has every option."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest

from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation import options as generation_options
from fastgen_cli import generate
from tests.cli.test_usage import COMMANDS

Said = Callable[..., str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints that only tells something."""

    def call(name: str, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            COMMANDS[name](list(words))
        found = capsys.readouterr()
        assert not ended.value.code and not found.err
        return found.out

    monkeypatch.setenv("COLUMNS", "80")
    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_page(name: str, said: Said) -> None:
    lines = said(name, "--help").splitlines()
    assert len(lines) < 100 and max(map(len, lines)) <= 120
    assert sum(line.startswith(f"  fastgen-{name} ") for line in lines[:8]) == 2
    assert "--help-all" in lines[-1]


def test_the_long_page_has_every_option(said: Said) -> None:
    page = said("generate", "--help-all")
    names = [field.name for field in dataclasses.fields(RunOptions) if field.metadata] + list(generation_options.TYPES)
    assert not [name for name in names if f"--{name.replace('_', '-')}" not in page]
    assert "status:" in page


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(name: str, shell: str, said: Said) -> None:
    pytest.importorskip("shtab")
    script = said(name, "--print-completion", shell)
    assert (f"fastgen-{name}" in script and "--no-fastgen" in script) or name == "quantize"


def test_help_and_errors_import_nothing_heavy() -> None:
    code = """
import contextlib, sys
from fastgen_cli import encode, generate, quantize
for main in (generate.main, encode.embed, encode.classify, quantize.main):
    with contextlib.suppress(SystemExit):
        main(["--help"])
for main in (generate.main, encode.embed, encode.classify):
    assert main(["model", "in.txt", "out.jsonl", "--dtype", "x"]) == 2
    assert main(["model", "in.txt", "out.jsonl", "--report", "/none/report.json"]) == 2
assert not {"torch", "transformers", "datasets", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_names_of_columns_may_have_spaces() -> None:
    given, _ = generate.parse(["model", "in.csv", "out.csv", "--keep", 'Product Name, label,"a, b"'])
    assert given["keep"] == ("Product Name", "label", "a, b")
