"""Command lists: operators that one call executes do what they do one by one, and hold what they are given."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgen.decoding.captured.recording import record
from fastgen.ops import (
    _library,
    elementwise,
    runtime,
)
from fastgen.ops.linear import copies

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
operators, aten = torch.ops.fastgen, torch.ops.aten
Calls = list[Callable[[], object]]


@pytest.fixture
def full() -> Iterator[None]:
    taken = []
    while True:
        operators.open_plan()
        number = operators.close_plan(0)
        if number < 0:
            break
        taken.append(number)
    yield
    for number in taken:
        operators.drop_plan(number)


def layers(x: Tensor, out: Tensor) -> Calls:
    """A norm, a product, an operator of torch's, two products in one, and an activation."""
    width = x.shape[1]
    weights = [torch.randn(width, width) for _ in range(3)]
    scaled, first, second, third = (torch.zeros_like(x) for _ in range(4))
    activation = elementwise.instructions(aten.silu.default, (third,), {}, [out])
    assert activation is not None
    return [
        partial(operators.rms_norm_out.default, scaled, x, torch.ones(width), 1e-6, 0.0, False),
        partial(operators.gemv_out.default, first, scaled, weights[0], torch.ones(width)),
        partial(aten.add_.Tensor, first, 1.0),
        partial(operators.gemv_batch_out.default, [second, third], first, weights[1:], [None, None]),
        elementwise.bound(activation),
    ]


def test_results_are_those_of_calls_one_by_one() -> None:
    x, out = torch.randn(3, 37), torch.zeros(3, 37)
    calls = layers(x, out)
    planned = runtime.with_command_lists(calls)
    assert len(planned) == 3 and planned[1] is calls[2]
    assert not out.any(), "nothing is executed before"
    for _ in range(3):  # what is in memory by then counts
        x.normal_()
        for call in calls:
            call()
        expected = out.clone()
        out.zero_()
        for call in planned:
            call()
        assert torch.equal(out, expected) and out.any()


def test_the_position_that_is_written_is_read_each_time() -> None:
    several, x, position = torch.zeros(4, 7), torch.randn(7), torch.tensor(0)
    instruction = elementwise.Instruction(elementwise._COPY, several[0], (x,), position=(position, 7, 4))
    call = elementwise.bound([instruction])
    (planned,) = runtime.with_command_lists([call, call])
    for at in (2, 0, 3, -1, 4):
        position.fill_(at)
        several.fill_(-1.0)
        planned()
        expected = torch.full((4, 7), -1.0)
        if 0 <= at < 4:
            expected[at] = x
        assert torch.equal(several, expected)


def test_memory_that_moves() -> None:
    """Sharing a tensor with other processes gives it other memory."""
    x, weight, out = torch.randn(3, 64), torch.randn(8, 64), torch.zeros(3, 8)
    parts = copies.rounded(weight, 8, 32)
    total = torch.zeros(3, 8)
    calls = [
        partial(operators.grouped_linear_out.default, out, x, *parts[:5], None, 8, 32, False, False),
        elementwise.bound([elementwise.Instruction(elementwise._ADD, total, (out, out))]),
    ]
    (planned,) = runtime.with_command_lists(calls)
    for moved in (x, parts[0], out, total, out):
        before = moved.data_ptr()
        if not moved.is_shared():
            moved.share_memory_()
            assert moved.data_ptr() != before
        x.normal_()
        planned()
        torch.testing.assert_close(out, x @ weight.t(), atol=0.5, rtol=0.1)
        assert torch.equal(total, out + out)


def test_what_does_not_fit_is_refused_when_it_is_planned() -> None:
    wrong = partial(operators.elementwise.default, [], torch.zeros(3))
    with pytest.raises(RuntimeError, match="elementwise"):
        runtime.with_command_lists([wrong, wrong])


def test_one_operator_alone_stays_as_it_is() -> None:
    calls = layers(torch.randn(2, 8), torch.zeros(2, 8))[:1]
    assert runtime.with_command_lists(calls) == calls and runtime.with_command_lists([]) == []


def test_what_a_plan_holds_is_given_back() -> None:
    x, out = torch.randn(2, 8), torch.zeros(2, 8)
    calls = layers(x, out)
    held = calls[0].args[2].untyped_storage()  # type: ignore[attr-defined]
    uses = torch._C._storage_Use_Count(held._cdata)
    planned = runtime.with_command_lists(calls)
    assert torch._C._storage_Use_Count(held._cdata) == uses, "of a tensor, not of its memory"
    del calls
    gc.collect()
    planned[0]()
    assert torch._C._storage_Use_Count(held._cdata) == uses
    del planned
    gc.collect()
    assert torch._C._storage_Use_Count(held._cdata) == uses - 1


def test_one_that_ends_during_a_recording_is_no_part_of_it() -> None:
    """Or each replay would drop the plan that has its number then."""
    x, out = torch.randn(2, 8), torch.zeros(2, 8)
    planned = runtime.with_command_lists(layers(x, out))
    number = planned[0].args[0]  # type: ignore[attr-defined]

    def function() -> None:
        planned.clear()
        out.copy_(x)

    recording, _ = record(function)
    assert [operation.function for operation in recording.operations] == [torch.ops.aten.copy_.default]
    with pytest.raises(RuntimeError, match="no such plan"):
        operators.run_plan(number)


def test_an_error_ends_the_plan_and_the_next_one_starts_anew() -> None:
    x, weight, out, length = torch.randn(2, 8), torch.randn(8, 8), torch.zeros(2, 8), torch.zeros(2, 8)
    product = partial(operators.gemv_out.default, out, x, weight, None)
    after = partial(operators.gemv_out.default, length, x, weight, None)
    wrong = partial(operators.gemv_out.default, out, torch.randn(2, 7), weight, None)
    (planned,) = runtime.with_command_lists([product, wrong, after])
    with pytest.raises(RuntimeError, match="gemv"):
        planned()
    assert out.any() and not length.any()
    (planned,) = runtime.with_command_lists([product, after])
    planned()
    assert length.any()


def test_what_no_operator_can_be_given_raises_at_once_and_closes_the_plan() -> None:
    product = partial(operators.gemv_out.default, torch.zeros(2, 8), "x", torch.zeros(8, 8), None)
    with pytest.raises(RuntimeError):
        runtime.with_command_lists([product, product])
    operators.open_plan()
    operators.close_plan(0)


def test_plans_of_other_threads_are_their_own() -> None:
    x, out, weight = torch.randn(2, 8), torch.zeros(2, 8), torch.randn(8, 8)
    operators.open_plan()
    thread = threading.Thread(target=operators.gemv_out, args=(out, x, weight, None))
    thread.start()
    thread.join()
    assert out.any() and operators.close_plan(0) >= 0


def test_numbers_that_are_none() -> None:
    for number in (-1, 4096, 2**40):
        with pytest.raises(RuntimeError, match="from 0 to 4095"):
            operators.run_plan(number)
    operators.open_plan()
    with pytest.raises(RuntimeError, match="has a plan open"):
        operators.open_plan()
    number = operators.close_plan(0)
    operators.drop_plan(number)
    operators.drop_plan(number)
    with pytest.raises(RuntimeError, match="no such plan"):
        operators.run_plan(number)
    with pytest.raises(RuntimeError, match="no plan open"):
        operators.close_plan(0)
    operators.open_plan()
    assert operators.close_plan(1) == -1


def test_without_a_place_calls_stay_single(full: None) -> None:
    x, out = torch.randn(2, 8), torch.zeros(2, 8)
    calls = layers(x, out)
    assert runtime.with_command_lists(calls) == calls


def test_names_are_those_of_the_kernels() -> None:
    sources = Path(__file__).parents[2] / "fastgen/csrc/cpu"
    registered = set()
    for source in sources.rglob("*.cpp"):
        for line in source.read_text(encoding="utf-8").splitlines():
            if "FASTGEN_PLANNED(" in line:
                registered.add("fastgen::" + line.split('impl("')[1].split('"')[0])
    by_themselves = {f"fastgen::{name}" for name in ("elementwise", "grouped_linear_out", "grouped_linear_batch_out")}
    assert not registered & by_themselves and registered | by_themselves == runtime.OPERATORS
