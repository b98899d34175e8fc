"""The report of `make test-newest`: it finds what declines, what differs, and which deprecations FastGen causes."""

from __future__ import annotations

import pytest
import torch

import fastgen
from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers import models
from fastgen.optimizer.transformers.cache_layers import StepLayer
from fastgen.releases import Usual
from tests import survey
from tests.equivalence.models import BY_NAME
from tests.release_report import Report


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """Steps are captured, though Triton is interpreted in tests."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    if graph.unavailable(torch.device("cpu")) is not None:
        pytest.skip("nothing is captured here")
    ways = {"beam search": ["beam"], "several samples": ["sampling, 4 returned"], "one sequence": ["greedy"]}
    monkeypatch.setattr(survey, "WAYS", ways)  # a case for each column is enough
    monkeypatch.setattr(survey, "_LONGER", {"max_new_tokens": 8, "min_new_tokens": 6})
    yield
    fastgen.enable()


def report_of(*names: str) -> Report:
    report = Report()
    with survey.surveying():
        report.add_rows("Models", survey.rows([BY_NAME[name] for name in names]))
    return report


def test_a_tested_release_has_nothing_to_mend():
    report = report_of("t5", "mistral-short-window")
    assert not report.problems
    assert "| `T5ForConditionalGeneration` | accelerated | accelerated | accelerated | captured |" in str(report)
    assert "Nothing is to be mended" in str(report) and "not among" not in str(report)


def test_models_that_decline_are_listed_by_the_reason(monkeypatch):
    monkeypatch.setattr(models, "unsupported", lambda model: Usual("a reason"))
    report = report_of("t5", "bart")
    (reason,) = report.problems
    assert reason == "original: a reason"
    for where in ("T5ForConditionalGeneration (greedy)", "BartForConditionalGeneration (beam)"):
        assert where in report.problems[reason]


def test_models_that_are_not_captured_are_listed(monkeypatch):
    def refuse(*_):
        raise CannotBeCaptured("a reason")

    monkeypatch.setattr(StepLayer, "get_mask_sizes", refuse)
    report = report_of("bloom")
    assert list(report.problems) == ["not captured: a reason"] and "1 to be mended" in str(report)
    assert "BloomForCausalLM (greedy)" in report.problems["not captured: a reason"]


def test_other_results_are_a_problem(monkeypatch):
    from fastgen.optimizer.transformers import prefill

    repeat = prefill._repeat
    monkeypatch.setattr(prefill, "_repeat", lambda logits, *more: -repeat(logits, *more))
    assert any(problem.startswith("other results") for problem in report_of("llama").problems)


def test_deprecations_that_fastgen_causes(monkeypatch):
    if releases.cache_name() != "cache":
        pytest.skip("this release has but one name")
    said = survey.Deprecations()
    with said.watched():
        report_of("llama")
    assert not said.caused
    monkeypatch.setattr(releases, "with_cache", lambda cache: {"past_key_values": cache})
    with said.watched():
        report_of("llama")
    (found,) = said.caused
    assert "past_key_values" in found and "optimizer/transformers/captured/step.py" in found
