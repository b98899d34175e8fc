"""A pytest plugin for tests on a GPU: runs them in random order, until a given time, and reports each result.

    FASTGEN_GPU_TESTS_SEED=S        seed of the order
    FASTGEN_GPU_TESTS_REPORT=FILE   gets JSON lines: the number of tests, then each finished test
    FASTGEN_GPU_TESTS_STOP=T        tests are left out after T (seconds since 1970)

With a `--device` other than the CPU, tests that do not use it are left out, and the models and inputs of
tests/equivalence are moved there. They are made on the CPU, so that weights and tokens are those that the tests were
chosen for. The report has for each test the number of calls with a captured step, and the reasons of the others.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from tools.gpu_check import LATE

_CAPTURED_STEP = "transformers.captured_step"  # its name in `fastgen.stats()`
# These make tensors on the CPU inside of `generate`.
CPU_ONLY = ("test_nested_generate", "test_autocast")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device", default="cpu")
    # Without pytest-xdist, one process does everything.
    runs_tests = "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", default=None)
    if runs_tests and device != "cpu" and any("equivalence" in str(argument) for argument in config.args):
        move_models(device)
        watch_captured_steps()


def move_models(device: str) -> None:
    """Creates the models and inputs of the equivalence grid on `device`, and moves those of other tests there."""
    import torch

    from tests.equivalence import check, models

    # Full float32, convolutions included: the tests compare FastGen, not two roundings.
    torch.backends.cudnn.allow_tf32 = False
    build, make_inputs = models.Family.build, models.Family.make_inputs

    @functools.wraps(build)
    def build_there(self: Any, *args: Any, **kwargs: Any) -> Any:
        return build(self, *args, **kwargs).to(device)

    @functools.wraps(make_inputs)
    def make_inputs_there(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value.to(device) for name, value in make_inputs(self, *args, **kwargs).items()}

    models.Family.build = build_there
    models.Family.make_inputs = make_inputs_there

    run = check.run

    @functools.wraps(run)
    def run_there(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
        return run(model.to(device), inputs, *args, **kwargs)

    check.run = run_there


_captured = {"captured": 0, "left_out": Counter[str]()}


def watch_captured_steps() -> None:
    """Counts calls with a captured step and without: tests reset FastGen's own counts."""
    from fastgen import counters

    accelerated, not_used = counters.count_accelerated, counters.count_not_used

    def count_accelerated(entry_point: str) -> None:
        _captured["captured"] += entry_point == _CAPTURED_STEP
        accelerated(entry_point)

    def count_not_used(entry_point: str, reason: str) -> None:
        if entry_point == _CAPTURED_STEP:
            _captured["left_out"][reason] += 1
        not_used(entry_point, reason)

    counters.count_accelerated, counters.count_not_used = count_accelerated, count_not_used


def _take_captured() -> dict[str, Any]:
    """Returns the counts since the last call."""
    found = {"captured": _captured["captured"], "left_out": dict(_captured["left_out"])}
    _captured["captured"] = 0
    _captured["left_out"].clear()
    return {name: value for name, value in found.items() if value}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device", default="cpu") != "cpu":
        kept = [item for item in items if _runs_there(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    items.sort(key=lambda item: item.nodeid)
    random.Random(os.environ.get("FASTGEN_GPU_TESTS_SEED", "0")).shuffle(items)
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        _write({"chosen": len(items)})


def _runs_there(item: pytest.Item) -> bool:
    """Returns whether a test uses a device other than the CPU: it requests it, or its models are moved."""
    if "equivalence" in item.path.parts:
        return not item.nodeid.partition("::")[2].startswith(CPU_ONLY)
    return "device" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get("FASTGEN_GPU_TESTS_STOP", "inf")):
        pytest.skip(LATE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        report.user_properties.append(("captured", _take_captured()))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test reports its call; a failure or a skip may also occur before it, and a failure after it.
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        line = {"test": report.nodeid, "outcome": report.outcome, "reason": _reason(report)}
        _write({**line, **dict(report.user_properties).get("captured", {})})


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.splitlines()[0][:300] if text else ""


def _write(line: dict[str, Any]) -> None:
    path = os.environ.get("FASTGEN_GPU_TESTS_REPORT")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
