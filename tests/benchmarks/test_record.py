from __future__ import annotations

import json

import pytest

from benchmarks.measure import summary
from benchmarks.record import Record, Target


def record(**fields) -> Record:
    return Record(name="name", title="Title", group="generation", **fields)


def test_ratio_of_medians_and_its_spread():
    made = record(backends={"transformers": summary([4.0, 6.0, 5.0]), "fastgen": summary([2.0, 2.0, 1.0])})
    made.compare()
    assert made.metrics == {"ratio": 2.5, "ratio_min": 2.0, "ratio_max": 5.0, "baseline_seconds": 5.0}


def test_ratios_of_further_backends():
    made = record(
        backends={
            name: summary([seconds]) for name, seconds in (("transformers", 4.0), ("other", 3.0), ("fastgen", 2.0))
        }
    )
    made.compare([("transformers", "fastgen"), ("other", "fastgen"), ("missing", "fastgen"), ("other", "missing")])
    assert made.metrics["other/fastgen"] == 1.5 and made.metrics["ratio"] == 2.0
    assert made.ratios == {
        "transformers/fastgen": {"ratio": 2.0, "min": 2.0, "max": 2.0},
        "other/fastgen": {"ratio": 1.5, "min": 1.5, "max": 1.5},
    }


@pytest.mark.parametrize(("measured", "met"), [(3.2, True), (3.1, False), (None, None)])
def test_lower_bound(measured, met):
    metrics = {} if measured is None else {"ratio": measured}
    judged = Target("times as fast", "ratio", at_least=3.2).judge(metrics)
    assert judged["met"] is met and judged["bound"] == "at least 3.2" and judged["measured"] == measured


@pytest.mark.parametrize(("measured", "met"), [(0.3, True), (0.31, False)])
def test_upper_bound(measured, met):
    assert Target("memory", "kv_ratio", at_most=0.3).judge({"kv_ratio": measured})["met"] is met


def test_a_target_may_not_apply():
    target = Target("not slower", "ratio", at_least=0.95, when=("baseline_seconds", 1.0))
    assert target.judge({"ratio": 0.5, "baseline_seconds": 0.2})["met"] is None
    assert target.judge({"ratio": 0.5, "baseline_seconds": 2.0})["met"] is False
    assert target.judge({"ratio": 0.5})["applies"] is False


def test_status():
    assert record().status == "ok"
    assert record(identical=True).status == "ok"
    assert record(identical=False).status == "different"
    assert record(identical=False, errors=["it broke"]).status == "failed"


def test_json_and_back():
    made = record(
        backends={"transformers": summary([1.0]), "fastgen": summary([0.5])}, identical=True, notes=["a note"]
    )
    made.compare()
    made.judge((Target("times as fast", "ratio", at_least=2),))
    data = json.loads(json.dumps(made.to_json()))
    assert data["status"] == "ok"
    assert Record.from_json({**data, "a field of tomorrow": 1}) == made
