"""Products with weights of 4 and 8 bits in the layout for GPUs, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import gpu as package
from fastgen.ops.linear import choose, copies
from fastgen.ops.linear import on_gpu as operator
from fastgen.ops.linear.weights import Layout, pack, unpacked
from tests.quantization.definitions import by_definition, random_weight

pytestmark = pytest.mark.sampled(5)

TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the result, of the sum of the products' sizes, and of what rounding the weight to the type adds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

cases = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(TYPES),
        "rows": st.integers(0, 20),
        "inputs": st.integers(1, 300),
        "outputs": st.integers(1, 150),
        "bits": st.sampled_from([4, 8]),
        # Of tiles of one group; of several in one; of no power of two; more than there are inputs.
        "group_size": st.sampled_from([32, 64, 128, 256, 8, 16, 24, 96, 7, 512]),
        "form": st.sampled_from(["middle", "zeros", "mins"]),
        "scales": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        "ordered": st.booleans(),
        "biased": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)
PLAIN = {
    "dtype": torch.float32, "rows": 3, "inputs": 200, "outputs": 70, "bits": 4, "group_size": 64, "form": "middle",
    "scales": torch.float16, "ordered": False, "biased": True, "seed": 0,
}  # fmt: skip


def weight_of(case, device):
    """A weight in lines, and what it stands for in float64, by the definition."""
    sizes = [case[name] for name in ("outputs", "inputs", "bits", "group_size")]
    kind = {"symmetric": case["form"] != "zeros", "mins": case["form"] == "mins", "act_order": case["ordered"]}
    weight = random_weight(*sizes, **kind, dtype=case["scales"], scale=0.1, seed=case["seed"])
    given = [None if part is None else part.to(device) for part in (*weight[:4], weight.order)]
    packed = pack(*given[:4], bits=case["bits"], group_size=case["group_size"], order=given[4], layout=Layout.ROWS)
    return packed, by_definition(weight).to(device)


def arguments_of(case, device):
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    # Rows with others between them, as a fused projection leaves them: what is there may not be read.
    wide = torch.full((case["rows"], 2, case["inputs"] + 5), math.nan, dtype=case["dtype"], device=device)
    x = wide[:, 1, : case["inputs"]]
    x.copy_(torch.randn(x.shape, generator=generator))
    bias = torch.randn(case["outputs"], generator=generator).to(device, case["dtype"]) if case["biased"] else None
    return x, bias


def check(case, device, product):
    weight, meant = weight_of(case, device)
    x, bias = arguments_of(case, device)
    y = product(x, weight, bias)
    assert y.shape == (case["rows"], case["outputs"]) and y.dtype is case["dtype"]
    added = 0.0 if bias is None else bias.double()
    exact = x.double() @ meant.t() + added
    # Sums are rounded in float32, and the result once.
    bound = 2e-6 * (x.double().abs() @ meant.abs().t() + 1.0)
    if case["dtype"] is not torch.float32:
        bound += TOLERANCE[case["dtype"]] * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all()


@given(case=cases)
@example(case=PLAIN | {"rows": 64, "inputs": 513, "dtype": torch.float16})
@example(case=PLAIN | {"rows": 1, "inputs": 2049, "outputs": 3, "dtype": torch.bfloat16})  # in parts
@example(case=PLAIN | {"rows": 2, "inputs": 4000, "outputs": 70, "form": "mins", "bits": 8})
@example(case=PLAIN | {"rows": 2, "inputs": 3000, "outputs": 65, "form": "zeros", "group_size": 3000})
@example(case=PLAIN | {"rows": 2, "inputs": 2000, "outputs": 65, "form": "mins", "group_size": 8})
@settings(max_examples=8)
def test_kernel(case, device, kernels):
    check(case, device, choose.linear)


@given(case=cases)
@settings(max_examples=12)
def test_reference(case, device):
    check(case, device, operator.reference)


@pytest.mark.parametrize("served", [True, False])
def test_more_rows_than_the_kernel_takes(served, device, monkeypatch):
    """The weight is unpacked, piece by piece."""
    if not served:
        monkeypatch.setattr(package, "available", lambda *tensors: False)
    case = PLAIN | {"rows": operator.MAX_ROWS + 1, "form": "zeros", "ordered": True}
    monkeypatch.setattr(operator, "_PIECE", 7 * case["inputs"])
    monkeypatch.setattr(operator, "_product", None)
    check(case, device, choose.linear)


@given(case=cases, count=st.integers(0, 30))
@settings(max_examples=8)
def test_lines(case, count, device, kernels):
    weight, meant = weight_of(case, device)
    which = torch.randint(0, case["outputs"], (count,), generator=torch.Generator().manual_seed(count)).to(device)
    dtype = torch.float16 if case["dtype"] is torch.bfloat16 else case["dtype"]  # the interpreter cuts bfloat16 off
    found, wanted = operator.rows(weight, which, dtype), meant[which]
    assert found.dtype is dtype and found.shape == (count, case["inputs"])
    # Twice float32, and once the type.
    bound = 2e-7 * (wanted.abs() + 30) + (1e-3 * wanted.abs() if dtype is torch.float16 else 0.0)
    assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("served", [True, False])
def test_lines_that_are_not_there_are_seen(served, device, kernels, monkeypatch):
    if not served:
        monkeypatch.setattr(package, "available", lambda *tensors: False)
    weight, meant = weight_of(PLAIN, device)
    which = torch.tensor([69, -1, 0, 70, 2**31], device=device)
    found = operator.rows(weight, which, torch.float32)
    assert found[[1, 3, 4]].isnan().all()
    torch.testing.assert_close(found[[0, 2]], meant[[69, 0]].float())


@given(case=cases)
@settings(max_examples=15)
def test_packing_loses_nothing(case):
    weight, _ = weight_of(case, "cpu")
    numbers, factors = unpacked(weight)
    assert numbers.shape == (case["outputs"], case["inputs"]) and int(numbers.max()) < 2 ** case["bits"]
    again = pack(
        numbers, *factors, bits=case["bits"], group_size=case["group_size"], order=weight.order, layout=Layout.ROWS
    )
    for ours, theirs in zip(again[:5], weight[:5], strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))
    some = torch.randint(0, case["outputs"], (4,))
    assert torch.equal(unpacked(weight, some)[0], numbers[some])
    if case["inputs"] % 32 == 0:
        assert weight.qweight.nbytes == case["outputs"] * case["inputs"] * case["bits"] // 8


@pytest.mark.skipif(not choose.is_available(), reason="no kernels on the CPU")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 130), (33, 64)])
def test_rounding_is_that_of_the_cpu(outputs, inputs, bits, dtype, monkeypatch):
    weight = torch.randn(outputs, inputs).to(dtype)
    weight[3], weight[5, 40], weight[7, 3] = 0.0, torch.inf, torch.nan
    monkeypatch.setattr(operator, "_PIECE", 9 * inputs)
    ours, theirs = operator.rounded(weight, bits, 64), copies.rounded(weight, bits, 64)
    numbers, factors = unpacked(ours)
    expected, others = unpacked(theirs)
    assert torch.equal(numbers, expected)
    torch.testing.assert_close(factors[0], others[0], rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused(device):
    weight, _ = weight_of(PLAIN, device)
    x = torch.randn(3, PLAIN["inputs"], device=device)
    for wrong, bias in ((x[:, :-1], None), (x.double(), None), (x, torch.randn(3, device=device))):
        with pytest.raises(RuntimeError, match="linear: "):
            choose.linear(wrong, weight, bias)


def test_shapes_around_it(device, kernels):
    weight, _ = weight_of(PLAIN, device)
    x = torch.randn(2, 3, PLAIN["inputs"], device=device)
    y = choose.linear(x, weight)
    assert torch.equal(y, choose.linear(x.flatten(0, 1), weight).view(2, 3, -1))
    torch.testing.assert_close(choose.linear(x[0, 0], weight), y[0, 0], rtol=1e-5, atol=1e-5)
    column = torch.randn(PLAIN["inputs"], 3, device=device).t()
    assert torch.equal(choose.linear(column, weight), choose.linear(column.contiguous(), weight))


class TestPlan:
    def weight(self, outputs, inputs, bits=4, group_size=64):
        groups = -(-inputs // group_size)
        numbers, scales = torch.empty(outputs, inputs, dtype=torch.uint8), torch.empty(outputs, groups)
        return pack(numbers, scales, bits=bits, group_size=group_size, layout=Layout.ROWS)

    def test_a_tile_has_one_group_where_groups_are_large(self):
        for group_size, block_k in ((32, 32), (64, 64), (96, 32), (128, 128), (256, 128), (1024, 128)):
            plan = operator.tiling(4, self.weight(64, 1024, group_size=group_size), 2, 132)
            assert (plan.block_k, plan.by_element) == (block_k, False)
        assert operator.tiling(4, self.weight(64, 1024, group_size=16), 2, 132).by_element

    def test_a_weight_of_few_outputs_is_worked_on_in_parts(self):
        few, many = self.weight(512, 4096, group_size=128), self.weight(50_000, 256, group_size=128)
        assert operator.tiling(1, few, 2, 132).splits == 8  # of four tiles each
        assert operator.tiling(16, few, 2, 132).splits == 2  # more would be written and read than is worth it
        assert operator.tiling(1, many, 2, 132).splits == 1
