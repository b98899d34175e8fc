"""What the pages name exists: files, options of the commands, settings, targets of make."""

from __future__ import annotations

import argparse
import functools
import re
from dataclasses import fields

import pytest

from fastgen import settings
from tests.docs.pages import NAMES, ROOT, blocks

# Folders of this repository; names below them are paths from its root.
_FOLDERS = r"(?:fastgen|fastgen_cli|tests|benchmarks|docs|examples|tools)"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_files_modules_and_links_exist():
    """Modules also where they are named without their folder."""
    known = {path.name for folder in _FOLDERS[3:-1].split("|") for path in (ROOT / folder).rglob("*.py")}
    known |= {"setup.py", "NAME.py", "_NAME.py"}
    for name in NAMES:
        text, here = read(name), (ROOT / name).parent
        files = set(re.findall(rf"(?<![\w/.-])({_FOLDERS}/[\w./-]*\w)", text))
        missing = {path for path in files if not (ROOT / path).exists() and not re.search(r"NAME|results/", path)}
        missing |= set(re.findall(r"(?<![\w/.-])(\w+\.py)\b", text)) - known
        missing |= {link for link in re.findall(r"\]\(([^)#:]+?)(?:#[\w-]+)?\)", text) if not (here / link).exists()}
        assert not missing, f"{name}: {missing}"


def options_of_the_commands() -> set[str]:
    from fastgen_cli import encode, generate, quantize
    from fastgen_serve import main

    parsers = [generate.build_parser(), quantize.build_parser(), main._parser()]
    parsers += [encode.build_parser(command) for command in (encode.EMBED, encode.CLASSIFY)]
    found = {name for parser in parsers for name in parser._option_string_actions}
    sources = [
        ROOT / path
        for path in (
            "tests/conftest.py",
            "benchmarks/__main__.py",
            "benchmarks/serving/__main__.py",
            "fastgen/__main__.py",
        )
    ]
    sources += [path for folder in ("tools", "fastgen_cli", "examples") for path in (ROOT / folder).glob("*.py")]
    for source in sources:
        found |= set(re.findall(r'"(--[\w-]+)"', source.read_text(encoding="utf-8")))
    return found


# Options of other programs: pip, pytest, FairSeq's commands.
FOREIGN = {*"--index-url --no-build-isolation --no-deps --strict --check --force-reinstall".split()}
OF_PODMAN = {
    *"--build-arg --cap-drop --cpus --format --read-only --security-opt --stop-timeout --tmpfs".split(),
}


@pytest.fixture(scope="module")
def known_options() -> set[str]:
    return options_of_the_commands() | FOREIGN | OF_PODMAN | options_of_fairseq()


def options_of_fairseq() -> set[str]:
    """Options of FairSeq's parsers, with those of the architectures and the task that the pages use."""
    import fastgen  # noqa: F401

    options = pytest.importorskip("fairseq.options")
    parsers = [
        options.get_preprocessing_parser(),
        options.get_training_parser(),
        options.get_generation_parser(),
        options.get_interactive_generation_parser(),
        options.get_eval_lm_parser(),
    ]
    found = {name for parser in parsers for name in parser._option_string_actions}
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    for owner in (
        ARCH_MODEL_REGISTRY["transformer"],
        ARCH_MODEL_REGISTRY["ngram_transformer_prophet_large"],
        TASK_REGISTRY["translation"],
        TASK_REGISTRY["translation_prophetnet"],
    ):
        parser = argparse.ArgumentParser(conflict_handler="resolve")
        owner.add_args(parser)
        found |= set(parser._option_string_actions)
    return found


@functools.cache
def sources() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (*(ROOT / "fastgen").rglob("*.py"), ROOT / "setup.py"))


@pytest.mark.parametrize("name", NAMES)
def test_options_settings_and_targets_of_make_exist(name, known_options):
    text, known = read(name), {field.name for field in fields(settings.Settings)}
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", text))
    assert not options - known_options, f"{name}: {sorted(options - known_options)}"
    given = {word for call in re.findall(r"fastgen\.enable\(([^)]*)\)", text) for word in re.findall(r"(\w+)=", call)}
    assert given <= known, f"{name}: {given - known}"
    variables = set(re.findall(r"\bFASTGEN_[A-Z_]+\b", text))
    missing = {each for each in variables if each.removeprefix("FASTGEN_").lower() not in known}
    assert all(each in sources() for each in missing), f"{name}: {missing}"
    targets = set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), re.MULTILINE))
    named = re.findall(r"`make ([a-z][\w-]*)", text)
    named += [word for block in blocks(ROOT / name) for word in re.findall(r"^make ([a-z][\w-]*)", block.text, re.M)]
    assert set(named) <= targets, f"{name}: {set(named) - targets}"


def test_reasons_of_the_troubleshooting_page_exist():
    """Those in the first column of its tables of reasons, as far as they are the same in every call."""
    tables = re.findall(r"^\| reason \| .*\n\|.*\n((?:\|.*\n)+)", read("docs/troubleshooting.md"), re.MULTILINE)
    cells = [row.removeprefix("| ").partition(" | ")[0] for table in tables for row in table.splitlines()]
    reasons = {reason for cell in cells for reason in re.split(r"; |\.\.\. ?", cell) if reason.strip()}
    assert len(reasons) > 20
    assert not {reason for reason in reasons if reason.strip() not in sources()}


def test_readme_has_the_two_commands():
    assert {"make demo", "make test"} <= {line.partition(" #")[0].strip() for line in read("README.md").splitlines()}


# A page for those who change FastGen.
OTHER_SHAPES = {"docs/contributing.md"}


@pytest.mark.parametrize("name", sorted({name for name in NAMES if name.startswith("docs/")} - OTHER_SHAPES))
def test_a_page_begins_with_what_it_is_for_and_ends_with_limits(name):
    title, _, rest = read(name).partition("\n")
    assert title.startswith("# ")
    assert re.match(r"\n[A-Z`][^|]*?[.:]\s", rest), f"{name}: {rest[:80]}"
    assert re.findall(r"^## (.*)$", rest, re.MULTILINE)[-1] == "Limits"


def test_every_page_is_in_the_navigation():
    pages = {name.removeprefix("docs/") for name in NAMES if name.startswith("docs/")}
    assert pages == set(re.findall(r": ([\w-]+\.md)$", read("mkdocs.yml"), re.MULTILINE))
