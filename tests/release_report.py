"""What FastGen does on the installed Transformers and torch, and what is to be mended: `make test-newest`.

    python -m tests.release_report [--report FILE] [--no-tests] [arguments of pytest]

Every model of the must-list (`fastgen.releases.MODELS`), encoders and commands run both ways, by default and with
captured steps (see survey.py). Then a part of the tests runs. The report is printed, and written to FILE.

Exit status: 0; 1 where a model of the must-list, an encoder or a command is not accelerated or gives other results,
where FastGen has the library say that something is deprecated, or where a test fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

import fastgen
from fastgen import releases
from fastgen.optimizer import transformers as optimizer
from tests.markdown import table

ROOT = Path(__file__).parents[1]
# Tests that tell whether calls are accelerated, on what the library hands on, and whether results are the same.
TESTS = (
    "test_releases.py",
    "equivalence/test_versions.py",
    "equivalence/test_transparent.py",
    "equivalence/test_models.py",
    "equivalence/test_captured.py",
    "equivalence/test_captured_user_code.py",
    "equivalence/test_encoders.py",
    "equivalence/test_failures.py",
    "equivalence/test_fallbacks.py",
    "equivalence/test_import_order.py",
    "equivalence/test_inputs.py",
    "equivalence/test_options.py",
    "equivalence/test_speculation.py",
    "equivalence/test_unilm.py",
    "equivalence/test_user_code.py",
    "models",
    "optimizer/transformers/quantized",
)
# They say that the release is a tested one, which the report says by itself.
_OF_TESTED_RELEASES = (
    "tests/test_releases.py::test_the_installed_release_is_a_tested_one",
    "tests/equivalence/test_versions.py::test_version_is_in_the_tested_range",
)


_NOT_TESTED = (
    f"**Transformers {transformers.__version__} is not among the tested releases** ({' to '.join(releases.TESTED)}). "
    "What releases call things is in fastgen/releases.py. When nothing is to be mended any more: write the release to "
    "constraints.txt and to `TRANSFORMERS_VERSIONS` of the Makefile, run `make test` with it, and move `TESTED` there."
)


class Report:
    """The report in Markdown, and what is to be mended."""

    def __init__(self) -> None:
        self._sections: list[str] = []
        self.problems: dict[str, list[str]] = defaultdict(list)  # by what is the matter: where

    def add(self, title: str, text: str) -> None:
        self._sections.append(f"## {title}\n\n{text}")

    def add_rows(self, title: str, rows: list[Any]) -> None:
        """A table of rows of survey.py. Problems are by reason: one change of the library may show in many rows."""
        self.add(title, table(["", *rows[0][1]], ([f"`{name}`", *row.values()] for name, row in rows)))
        for name, row in rows:
            for cell in row.values():
                for case, reason in cell.problems:
                    self.problems[reason].append(f"{name} ({case})")

    def __str__(self) -> str:
        title = f"# FastGen with Transformers {transformers.__version__} and torch {torch.__version__}"
        return "\n\n".join([title, *self._verdict(), *self._sections]) + "\n"

    def _verdict(self) -> Iterator[str]:
        if not releases.is_tested(transformers.__version__):
            yield _NOT_TESTED
        if not self.problems:
            yield "**Nothing is to be mended**: all that must be accelerated is, with the same results."
            return
        yield f"**{len(self.problems)} to be mended**, each with where it shows:"
        yield "\n".join(f"- {what}: {_some(where)}" for what, where in self.problems.items())


def _some(where: list[str], most: int = 8) -> str:
    more = len(where) - most
    return ", ".join(where[:most]) + (f" and {more} more" if more > 0 else "")


def make(report: Report, arguments: list[str] | None) -> None:
    """Fills the report.

    Args:
        arguments: of pytest; None to run no tests.
    """
    report.add("Versions", table(["package", "version", "constraints.txt"], _versions()))
    refused = [(name, state) for name, state in _patches() if state != "applied"]
    report.add("Patches that are not applied", table(["patch", "state"], refused) if refused else "None.")
    for name, state in refused:
        report.problems[f"{name} is {state}"].append("patches")
    try:
        _survey(report)
    except ImportError as error:  # the release lacks something that FastGen builds on
        report.problems[f"{type(error).__name__}: {error}"].append("import")
    if arguments is not None:
        failures, last = _failed_tests(arguments)
        report.add("Tests", "\n".join(f"- {each}" for each in [last, *failures]))
        for each in failures:
            report.problems[each].append("tests")


def _survey(report: Report) -> None:
    from tests import survey
    from tests.equivalence.models import FAMILIES

    said = survey.Deprecations()
    with survey.surveying(), said.watched():
        report.add_rows("Models that must be accelerated", survey.rows(FAMILIES) + survey.unilm())
        report.add_rows("Encoders", survey.encoders())
    report.add_rows("Commands", survey.commands())
    report.add("Deprecations that FastGen causes", "\n".join(f"- {each}" for each in said.caused) or "None.")
    for each in said.caused:
        report.problems[each].append("deprecations")


def _versions() -> Iterator[tuple[str, str, str]]:
    """Of Python, FastGen, and each package that is not the one of constraints.txt."""
    yield "python", platform.python_version(), ""
    yield "fastgen", fastgen.__version__, ""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for name, _, pinned in (line.partition("==") for line in lines if not line.startswith("#")):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.partition("+")[0] != pinned or name in ("torch", "transformers"):
            yield name, version, pinned


def _patches() -> Iterator[tuple[str, str]]:
    """The patches whose modules this release has, and their states."""
    for patch in optimizer.patches():
        if patch.module.startswith("transformers."):
            try:
                importlib.import_module(patch.module)
            except ModuleNotFoundError as error:
                if f"{patch.module}.".startswith(f"{error.name}."):
                    continue  # a model that other releases have
                raise
            yield patch.name, fastgen.status().patches[patch.name]


def _failed_tests(arguments: Iterable[str]) -> tuple[list[str], str]:
    """The tests that failed, with the reason, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", *(f"tests/{name}" for name in TESTS)]
    command += [word for test in _OF_TESTED_RELEASES for word in ("--deselect", test)]
    environment = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    failures = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
    if done.returncode not in (0, 1) or bool(done.returncode) != bool(failures):
        failures.append(f"pytest ended with status {done.returncode}: {' '.join(lines[-3:])}")
    return failures, lines[-1].strip("= ") if lines else ""


def main() -> int:
    """Prints and writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m tests.release_report")
    parser.add_argument("--report", type=Path, help="also written to this file")
    parser.add_argument("--no-tests", action="store_true", help="models, encoders and commands only")
    options, arguments = parser.parse_known_args()
    report = Report()
    try:
        make(report, None if options.no_tests else arguments)
    finally:  # also of what there is when a release lacks something that the survey itself needs
        print(report)
        if options.report:
            options.report.write_text(str(report))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
