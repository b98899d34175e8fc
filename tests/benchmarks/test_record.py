from __future__ import annotations

import json

from benchmarks.measure import summary
from benchmarks.record import Record


def record(**fields) -> Record:
    return Record(name="name", title="Title", group="generation", **fields)


def test_ratio_of_medians_and_its_spread():
    made, runs = record(), {"transformers": [4.0, 6.0, 5.0], "fastgen": [2.0, 2.0, 1.0]}
    found = made.take({name: [(seconds, name) for seconds in times] for name, times in runs.items()})
    assert found == {name: [name] * 3 for name in runs}
    assert made.backends == {name: summary(times) for name, times in runs.items()}
    assert made.metrics == {
        "transformers/fastgen": 2.5, "ratio": 2.5, "ratio_min": 2.0, "ratio_max": 5.0, "baseline_seconds": 5.0
    }  # fmt: skip


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


def test_json_and_back():
    made = record(
        backends={"transformers": summary([1.0]), "fastgen": summary([0.5])}, identical=True, notes=["a note"]
    )
    made.compare()
    data = json.loads(json.dumps(made.to_json()))
    assert data["status"] == "ok"
    assert Record.from_json({**data, "a field of tomorrow": 1}) == made
