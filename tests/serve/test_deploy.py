"""What operators are given fits the server: the dashboard, the tables of the page, the image, and the unit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from fastgen_serve import main, metrics
from fastgen_serve.api import openai_schema
from tests.serve.servers import ROOT

PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
IMAGE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
UNIT = ROOT / "deploy" / "fastgen-serve.service"
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def exported() -> set[str]:
    """The names that samples of the server may have."""
    families = list(metrics.REGISTRY.collect())
    return {f"{each.name}{suffix}" for each in families for suffix in _SUFFIXES.get(each.type, ("",))}


def test_the_dashboard_asks_for_what_is_exported() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:fastgen|process)_\w+", text)}
    assert len(asked) > 15 and asked <= exported(), asked - exported()


def labels() -> dict[str, set[str]]:
    """Those of each metric of FastGen, by its name without suffixes."""
    described = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]
    computed = [each for each in metrics.REGISTRY.collect() if hasattr(each, "_labelnames")]
    named = [(each._name, each) for each in described] + [(each.name, each) for each in computed]
    return {name: set(each._labelnames) for name, each in named}


def test_the_dashboard_asks_for_labels_that_there_are() -> None:
    known = labels()
    for target in (target for panel in DASHBOARD["panels"] for target in panel["targets"]):
        names = re.findall(r"\bfastgen_\w+?(?=(?:_total|_bucket|_sum|_count)?\b)", target["expr"])
        common = set.intersection(*(known[name] for name in names)) | {"le", "job", "instance"}
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
        matched = set(re.findall(r"(\w+)(?:=~|!=|=)\"", target["expr"]))
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert grouped | matched <= common, target
        assert shown <= (grouped - {"le"} or common), target  # what is not grouped by is summed up


def test_the_panels_of_the_dashboard_have_places_of_their_own() -> None:
    taken = [
        (column, row)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken)) and max(column for column, _ in taken) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        names = [target["refId"] for target in panel["targets"]]
        assert len(names) == len(set(names)) and panel["datasource"]["uid"] == "${source}"


def test_the_page_has_each_metric() -> None:
    assert not {name for name in exported() if name.startswith("fastgen_") and not _is_named(name)}


def _is_named(name: str) -> bool:
    return f"`{name}`" in PAGE or f"`{re.sub('_(bucket|sum|count)$', '', name)}`" in PAGE


def test_the_page_has_each_option() -> None:
    options = {name for name in main._parser()._option_string_actions if name.startswith("--")}
    on_or_off = {"--help", "--warm-up"}  # the page has --no-warm-up
    assert not {name for name in options - on_or_off if not re.search(rf"`{name}(?![\w-])", PAGE)}


@pytest.mark.parametrize("request_of", ["CompletionRequest", "ChatRequest", "EmbeddingRequest", "StreamOptions"])
def test_the_page_has_each_field(request_of: str) -> None:
    fields = getattr(openai_schema, request_of).model_fields.keys() - {"include_usage", "include_obfuscation"}
    assert not {name for name in fields if f"`{name}`" not in PAGE}


def test_an_image_is_not_built_from_what_git_ignores() -> None:
    """As the operators here, which were built for another Python and torch, or environments of gigabytes."""
    ignored = _patterns(ROOT / ".gitignore") - {"benchmarks/results/*/logs"}
    assert ignored | {".git"} <= _patterns(ROOT / ".dockerignore")


def instructions(name: str) -> list[str]:
    """What follows an instruction of the container file, each time."""
    lines = "\n".join(line for line in IMAGE.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} ")]


def test_an_image_is_built_from_what_a_wheel_is_built_from() -> None:
    copied = {word for words in instructions("COPY") if not words.startswith("--from") for word in words.split()[:-1]}
    assert not {name for name in copied if not (ROOT / name).exists()}
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    build = project["build-system"]
    backend = {f"{folder}/{build['build-backend']}.py" for folder in build["backend-path"]}
    files = {"pyproject.toml", "setup.py", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == packages | backend | files | {"constraints.txt"}


def test_the_image_starts_and_checks_a_server() -> None:
    [entry], [check], [port] = (instructions(name) for name in ("ENTRYPOINT", "HEALTHCHECK", "EXPOSE"))
    program, *words = json.loads(entry)
    settings = main.read([*words, str(ROOT / "examples" / "models" / "kjv-gpt2")])
    assert program == main.PROGRAM and settings.host == "0.0.0.0" and settings.port == int(port)
    assert f"http://127.0.0.1:{port}/health'" in check and check.count("CMD") == 1


def test_the_image_does_not_run_as_root() -> None:
    """By a number: where Kubernetes is to see to it, it cannot look a name up."""
    [user] = instructions("USER")
    assert int(user) > 0 and f"--uid {user} " in IMAGE


def test_requests_have_time_to_end_when_a_container_or_the_unit_stops() -> None:
    unit = UNIT.read_text(encoding="utf-8")
    patience = [int(found) for found in re.findall(r"(?:--stop-timeout |^TimeoutStopSec=)(\d+)", IMAGE + unit, re.M)]
    assert len(patience) == 2
    # The answers, and the processes of the models, get a few seconds more.
    assert min(patience) >= main.read([str(ROOT)]).drain_s + 10


def test_the_unit_starts_a_server() -> None:
    unit = UNIT.read_text(encoding="utf-8")
    [words] = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    program, *arguments = words.split()
    given = main._parser().parse_args(arguments)
    assert Path(program).name == main.PROGRAM and given.models
    [credential] = re.findall(r"^LoadCredential=(\w+):", unit, re.M)
    assert given.api_key_file == f"%d/{credential}"
    assert f"\nRestartPreventExitStatus={main.SETUP}\n" in unit


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """A word that it does not know is a warning only."""
    installed = UNIT.read_text(encoding="utf-8").replace("/opt/fastgen/bin/fastgen-serve", sys.executable)
    copy = tmp_path / UNIT.name
    copy.write_text(installed, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(copy)]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def _patterns(path: Path) -> set[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {line.removeprefix("**/").strip("/") for line in lines if line and not line.startswith("#")}
