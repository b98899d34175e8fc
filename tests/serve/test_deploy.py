"""What operators are given fits the server: the dashboard, the tables of the page, and the image."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastgen_serve import main, metrics
from fastgen_serve.api import openai_schema
from tests.serve.servers import ROOT

PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def exported() -> set[str]:
    """The names that samples of the server may have."""
    families = list(metrics.REGISTRY.collect())
    return {f"{each.name}{suffix}" for each in families for suffix in _SUFFIXES.get(each.type, ("",))}


def test_the_dashboard_asks_for_what_is_exported() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:fastgen|process)_\w+", text)}
    assert len(asked) > 15 and asked <= exported(), asked - exported()


def test_the_dashboard_offers_models_of_all_kinds(url: str, paths: dict[str, str]) -> None:
    """Also those that only encode, which have no slots."""
    [query] = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    found = re.fullmatch(r"label_values\((\w+), model\)", query)
    assert found is not None
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == found[1]]
    assert {sample.labels["model"] for sample in samples} >= paths.keys()


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


def _patterns(path: Path) -> set[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {line.removeprefix("**/").strip("/") for line in lines if line and not line.startswith("#")}
