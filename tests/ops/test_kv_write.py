"""Writing into the cache at positions in memory, by each kernel and the reference: there, and nowhere else."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import _library
from fastgen.ops import gpu as package
from fastgen.ops.kv_write import kv_write, reference


@pytest.fixture(params=["reference", "kernel of the CPU", "without a GPU", "triton"], scope="session")
def write(request, device):
    """An operator and its device. Without a GPU, positions that the kernel does not take are torch's matter."""
    if request.param == "reference":
        return reference, device
    if request.param == "triton":
        request.getfixturevalue("kernels")
        return kv_write, device
    if _library.load("CPU"):
        pytest.skip(_library.load("CPU"))

    def without_a_gpu(*given):
        with mock.patch.object(package, "available", lambda *tensors: False):
            kv_write(*given)

    operator = without_a_gpu if request.param == "without a GPU" else torch.ops.fastgen.kv_write
    return operator, torch.device("cpu")


PLAIN = {
    "dtype": torch.float16, "rows": 4, "heads": 3, "capacity": 5, "dims": (64, 64), "position": 4,
    "position_type": torch.int32,
}  # fmt: skip


@given(
    case=st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
            "rows": st.integers(1, 9),
            "heads": st.integers(1, 33),
            "capacity": st.integers(1, 12),
            "dims": st.sampled_from([(1, 1), (64, 64), (80, 80), (112, 64), (256, 256)]),
            # One for all rows, or as many as there may be rows.
            "position": st.integers(-2, 13) | st.lists(st.integers(-2, 13), min_size=9, max_size=9),
            "position_type": st.sampled_from([torch.int32, torch.int64]),
        }
    )
)
@example(case=PLAIN | {"position": -1})
@example(case=PLAIN | {"position": 5})
@example(case=PLAIN | {"position": [4, -1, 0, 5]})
@example(case=PLAIN | {"position": [4, -1, 2**40, 0], "position_type": torch.int64})
@example(case=PLAIN | {"dims": (7, 3), "position": 0})
@example(case=PLAIN | {"dims": (9, 0), "position": 2})  # K and V in one tensor
@example(case=PLAIN | {"dtype": torch.float64})
@settings(max_examples=20)
def test_positions(write, case):
    operator, device = write
    kind = torch.int64 if operator is torch.ops.fastgen.kv_write else case["position_type"]

    def tensor(*shape):
        return torch.randn(*shape).to(device, case["dtype"])

    rows, heads, capacity = case["rows"], case["heads"], case["capacity"]
    positions = case["position"][:rows] if isinstance(case["position"], list) else case["position"]
    position = torch.tensor(positions, dtype=kind, device=device)
    new = [tensor(rows, heads, 2, width)[:, :, 1] for width in case["dims"]]
    # In memory, every second head and place belongs to somebody else; theirs is NaN, and stays so.
    memory = [tensor(rows, 2 * heads, 2 * capacity, width).fill_(math.nan) for width in case["dims"]]
    wanted = [part.clone() for part in memory]
    operator(*new, *(part[:, ::2, ::2] for part in memory), position)
    for row, at in enumerate(position.expand(rows).tolist()):
        for part, value in zip(wanted, new, strict=True):
            if 0 <= at < capacity:
                part[row, ::2, 2 * at] = value[row]
    for part, other in zip(memory, wanted, strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=0, equal_nan=True)


def test_rows_of_others(write):
    operator, device = write
    new = [torch.randn(4, 3, width, device=device) for width in (8, 5)]
    caches = [torch.zeros(2, 3, 6, width, device=device) for width in (8, 5)]
    row_map, position = (torch.tensor(each, device=device) for each in ([1, 0, 1, 1], [0, 2, 5, 9]))
    operator(*new, *caches, position, row_map)
    for cache, part in zip(caches, new, strict=True):
        wanted = torch.zeros_like(cache)
        wanted[1, :, 0], wanted[0, :, 2], wanted[1, :, 5] = part[0], part[1], part[2]
        assert torch.equal(cache, wanted)


def test_a_position_of_any_shape_and_one_source_for_all_rows(write):
    operator, device = write
    keys = torch.randn(1, 2, 4, device=device).expand(3, 2, 4)
    cache = torch.zeros(3, 2, 5, 4, device=device)
    operator(keys, keys, cache, cache.clone(), torch.tensor([[2]], device=device))
    assert cache[:, :, 2].equal(keys) and not cache[:, :, [0, 1, 3, 4]].any()


@pytest.mark.parametrize("interpreted", ["0", "1"])  # the kernel of the CPU, and Triton's
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(2, 3, 9)}, "into a cache"),
        ({"keys": torch.zeros(2, 3, 8).double()}, "float64 into a cache"),
        ({"values": torch.zeros(3, 3, 8)}, "into a cache"),
        ({"position": torch.tensor([1, 2, 3])}, "one for each row"),
        ({"position": torch.tensor([[1, 2]])}, "one for each row"),
        ({"position": torch.tensor(1.0)}, "one integer"),
        ({"value_cache": torch.zeros(2, 3, 6, 8)}, "different shapes"),
    ],
)
def test_wrong_arguments(changes, message, interpreted, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    fitting = {"keys": torch.ones(2, 3, 8), "values": torch.ones(2, 3, 8)}
    fitting |= {"key_cache": torch.zeros(2, 3, 5, 8), "value_cache": torch.zeros(2, 3, 5, 8)}
    arguments = fitting | {"position": torch.tensor(1)} | changes
    with pytest.raises(ValueError, match=message):
        kv_write(**arguments)
    assert not arguments["key_cache"].any() and not arguments["value_cache"].any()
