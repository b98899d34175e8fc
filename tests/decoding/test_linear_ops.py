"""Weights whose numbers have 16 bits: which products read a copy, that no bit changes, and how long a copy lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgen
from fastgen import settings
from fastgen.decoding import derived_weights, linear_ops
from fastgen.decoding.captured.program import Program
from fastgen.ops import fingerprint, runtime
from fastgen.ops.linear import choose, kernels
from fastgen.ops.linear import copies as packing
from fastgen.ops.linear.kernels import GEMM
from tests.noting import noted

pytestmark = [
    pytest.mark.skipif(not choose.reads_panels(1), reason="no kernel reads panels on this instruction set"),
    pytest.mark.sampled(5),
]

OUTPUTS, INPUTS = 60, 64
TYPES = pytest.mark.parametrize("dtype", packing.TYPES, ids=str)


@pytest.fixture(autouse=True)
def with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    fastgen.reset_stats()
    monkeypatch.setattr(derived_weights, "MIN_PANELS", 0)


def weight_of(dtype: torch.dtype, outputs: int = OUTPUTS) -> Tensor:
    return torch.randn(outputs, INPUTS).to(dtype).float()


class Step:
    def __init__(self, *weights: Tensor, rows: int = 2, biased: bool = False) -> None:
        self.x, self.weights = torch.randn(rows, INPUTS), weights
        self.biases = [torch.randn(len(weight)) if biased else None for weight in weights]
        self.out = [torch.zeros(rows, len(weight)) for weight in weights]
        of = zip(weights, self.biases, strict=True)
        self.with_panels = {each.data_ptr() for each, bias in of if linear_ops.has_panels(self.x, each, bias)}
        self.program = Program()
        self.program.capture(self.step)

    def step(self) -> None:
        found = [F.linear(self.x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        for out, each in zip(self.out, found, strict=True):
            out.copy_(each)

    def is_right(self) -> bool:
        """Whether the next step has the bits of products with the weights as they are."""
        self.x.normal_()
        self.program.replay()
        of = zip(self.out, self.weights, self.biases, strict=True)
        return all(torch.equal(out, self._product(weight.detach(), bias)) for out, weight, bias in of)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of a weight whose numbers seem to have 16 bits, that of GEMM, with a copy and without one."""
        if weight.data_ptr() in self.with_panels:
            return GEMM.multiply(self.x, weight, bias)
        kernel = choose.kernel_for(self.x, weight, bias)
        assert kernel is not None
        return kernel.multiply(self.x, weight, bias)

    def call(self, steps: int = 5) -> bool:
        with derived_weights.call():
            return all([self.is_right() for _ in range(steps)])


Found = Callable[[], list[derived_weights.DerivedWeight]]


@pytest.fixture
def known(new_copies: Found) -> Found:
    return lambda: [each for each in new_copies() if each.format is derived_weights.PANELS]


@pytest.fixture
def copies(known: Found) -> Found:
    return lambda: [each for each in known() if each.copy is not None]


@TYPES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, kernels.PANELS_MAX_ROWS])
def test_products_read_fewer_bits(dtype: torch.dtype, biased: bool, rows: int, copies: Found) -> None:
    step = Step(weight_of(dtype), rows=rows, biased=biased)
    assert step.call() and len(copies()) == 1
    assert step.call()


def test_several_with_one_input(copies: Found) -> None:
    """In whatever type each is, and with one that is none of them."""
    weights = [
        weight_of(torch.bfloat16),
        weight_of(torch.float16, 7),
        torch.randn(30, INPUTS),
        weight_of(torch.bfloat16, 9),
    ]
    step = Step(*weights)
    assert step.call() and len(copies()) == 3
    assert fastgen.stats()[derived_weights.PANELS.counted_as]["accelerated"] == 1


def test_one_number_that_is_none_of_16_bits(copies: Found) -> None:
    """Where the first look does not see it: that weight is read as it is, the others are not."""
    odd = weight_of(torch.bfloat16)
    odd[7, 11] += 2**-20
    step = Step(odd, weight_of(torch.bfloat16, 33))
    assert step.call(50) and len(copies()) == 1
    assert step.call(50) and len(copies()) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Step(torch.randn(OUTPUTS, INPUTS)),
        lambda: Step(weight_of(torch.bfloat16), rows=kernels.PANELS_MAX_ROWS + 1),
        lambda: Step(torch.randn(INPUTS, OUTPUTS).bfloat16().float().t()),
        lambda: Step(torch.randn(OUTPUTS, 2 * INPUTS).bfloat16().float()[:, :INPUTS]),
    ],
)
def test_no_copy(make: Callable[[], Step], known: Found) -> None:
    step = make()
    step.call()
    assert not known() and derived_weights.PANELS.counted_as not in fastgen.stats()


def test_no_copy_where_products_are_torchs_own(monkeypatch: pytest.MonkeyPatch, known: Found) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(packed_weights="never"))
    Step(weight_of(torch.bfloat16)).call()
    assert not known()


def test_a_weight_that_the_step_writes_has_no_copy(known: Found) -> None:
    """Nor one that it makes: it changes from step to step."""
    x, weight, out = torch.randn(2, INPUTS), torch.zeros(INPUTS, INPUTS), torch.zeros(2, INPUTS)

    def step() -> None:
        weight.add_(x[:1].bfloat16().float())
        made = F.linear(x, weight.bfloat16().float())
        out.copy_(F.linear(x, weight) + made)

    program = Program()
    program.capture(step)
    with derived_weights.call():
        for _ in range(5):
            before = weight.clone()
            program.replay()
            found, after = out.clone(), weight.clone()
            weight.copy_(before)
            step()
            torch.testing.assert_close(found, out)
            assert torch.equal(weight, after)
    assert not known()


# ---- how long a copy lives, and what it stands for


def test_a_call_of_one_step_makes_none(monkeypatch: pytest.MonkeyPatch, copies: Found) -> None:
    step = Step(weight_of(torch.bfloat16))
    with monkeypatch.context() as context:
        context.setattr(fingerprint, "fingerprint", None)
        for _ in range(3):
            assert step.call(steps=1) and not copies()
    assert step.call(steps=2) and copies()
    with monkeypatch.context() as context:
        context.setattr(fingerprint, "fingerprint", None)
        assert step.call(steps=1)


@pytest.mark.parametrize("dtype", [*packing.TYPES, torch.float32], ids=str)
def test_a_weight_that_has_changed_between_two_calls(dtype: torch.dtype, copies: Found) -> None:
    """Also in a way that leaves no trace in torch's version counter; to numbers of 16 bits or others."""
    weight = torch.nn.Parameter(weight_of(torch.bfloat16))
    step = Step(weight)
    assert step.call() and copies()
    version = weight._version
    for _ in range(2):
        weight.data[30:] = weight_of(dtype)[30:]
        assert step.call() and not copies()
    weight.data.copy_(weight_of(dtype))
    assert step.call(derived_weights.STEPS_OF_COPY + 3) and len(copies()) == (dtype is not torch.float32)
    assert weight._version == version
    weight.data.copy_(weight_of(torch.float16))
    for _ in range(derived_weights.BACK_OFF + 2):
        assert step.call(3)
    assert step.call(derived_weights.STEPS_OF_COPY + 3) and len(copies()) == 1


def test_code_of_others_inside_a_call_may_write_to_weights(copies: Found) -> None:
    step = Step(weight_of(torch.bfloat16))
    with derived_weights.call():
        assert all(step.is_right() for _ in range(3)) and copies()
        derived_weights.third_party_runs()
        with derived_weights.call():  # of others, inside
            step.weights[0].data.copy_(weight_of(torch.bfloat16))
        assert all(step.is_right() for _ in range(20))
    assert step.call(2 * derived_weights.STEPS_OF_COPY) and copies()


def test_a_step_with_copies_is_one_plan_that_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without them is. In each call, both kinds of step are there again."""
    made, plan = [], runtime.with_command_lists
    monkeypatch.setattr(runtime, "with_command_lists", lambda calls: made.append(plan(calls)) or made[-1])
    step = Step(weight_of(torch.bfloat16), torch.randn(30, INPUTS), weight_of(torch.float16))
    assert step.call() and step.call() and step.call(1) and step.call()
    unpacked, packed = filter(None, made)  # there are no calls before the capture
    for calls in (unpacked, packed):
        assert len([call for call in calls if call.func is torch.ops.fastgen.run_plan.default]) == 1
        assert not any(call.func.name() in runtime.OPERATORS for call in calls)


def test_a_weight_that_is_read_twice_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its products read the copy, and none does in the first step of a call."""
    weight = weight_of(torch.bfloat16)
    step = Step(weight, weight)
    assert step.call() and step.call()
    calls = [str(call.func) for call in step.program.calls(planned=False)]
    assert len([name for name in calls if "gem" in name]) == len([name for name in calls if "panels" in name]) > 0


def test_copies_are_asked_for_until_they_do_not_change(monkeypatch: pytest.MonkeyPatch, copies: Found) -> None:
    step, asked = Step(weight_of(torch.bfloat16)), noted(monkeypatch, derived_weights.DerivedWeight, "in_step")
    for _ in range(2):
        asked.clear()
        assert step.call(9) and len(asked) == 2
    step.weights[0].data.copy_(weight_of(torch.bfloat16))
    asked.clear()
    assert step.call(derived_weights.STEPS_OF_COPY + 9) and copies()
    assert len(asked) == derived_weights.STEPS_OF_COPY + 1


def test_a_copy_of_a_weight_that_has_changed_is_freed() -> None:
    """No program holds it any longer than it takes to see the change."""
    weight = weight_of(torch.bfloat16)
    step = Step(weight)
    assert step.call()
    copy = weakref.ref(derived_weights.of(weight, derived_weights.PANELS).copy.qweight)
    assert step.call(1) and copy() is not None
    weight.normal_()
    assert step.call(2) and copy() is None


def test_calls_are_counted() -> None:
    step = Step(weight_of(torch.bfloat16))
    for steps in (1, 2, 9):
        step.call(steps)
    assert fastgen.stats()[derived_weights.PANELS.counted_as] == {"accelerated": 2, "fallback": {}}


def test_suspended() -> None:
    x, weight = torch.randn(1, 512), torch.randn(256, 512).bfloat16().float()
    assert linear_ops.has_panels(x, weight, None)
    with linear_ops.panels_suspended():
        assert not linear_ops.has_panels(x, weight, None)
    assert linear_ops.has_panels(x, weight, None)
