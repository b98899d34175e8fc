"""Writing into the cache at a position on the device: that position and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops.kv_write import kv_write, reference

cases = st.fixed_dictionaries(
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
PLAIN = {
    "dtype": torch.float16, "rows": 4, "heads": 3, "capacity": 5, "dims": (64, 64), "position": 4,
    "position_type": torch.int32,
}  # fmt: skip


def check(operator, case, device):
    def tensor(*shape):
        return torch.randn(*shape).to(device, case["dtype"])

    rows, heads, capacity = case["rows"], case["heads"], case["capacity"]
    positions = case["position"][:rows] if isinstance(case["position"], list) else case["position"]
    position = torch.tensor(positions, dtype=case["position_type"], device=device)
    new = [tensor(rows, heads, 2, width)[:, :, 1] for width in case["dims"]]
    # In memory, every second head and place belongs to somebody else; theirs is NaN, and stays so.
    memory = [
        torch.full((rows, 2 * heads, 2 * capacity, width), math.nan, dtype=case["dtype"]) for width in case["dims"]
    ]
    memory = [part.to(device) for part in memory]
    caches = [part[:, ::2, ::2] for part in memory]
    wanted = [part.clone() for part in memory]
    operator(*new, *caches, position)
    for row, at in enumerate(position.expand(rows).tolist()):
        for part, value in zip(wanted, new, strict=True):
            if 0 <= at < capacity:
                part[row, ::2, 2 * at] = value[row]
    for part, other in zip(memory, wanted, strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=0, equal_nan=True)


@given(case=cases)
@example(case=PLAIN | {"position": -1})
@example(case=PLAIN | {"position": 5})
@example(case=PLAIN | {"position": [4, -1, 0, 5]})
@settings(max_examples=10)
def test_kernel(case, device, kernels):
    check(kv_write, case, device)


@given(case=cases)
@settings(max_examples=25)
def test_reference(case, device):
    check(reference, case, device)


def some_arguments():
    """Arguments that fit: ones to be written into zeros."""
    return {
        "keys": torch.ones(2, 3, 8),
        "values": torch.ones(2, 3, 8),
        "key_cache": torch.zeros(2, 3, 5, 8),
        "value_cache": torch.zeros(2, 3, 5, 8),
        "position": torch.tensor(1),
    }


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
    arguments = some_arguments() | changes
    with pytest.raises(ValueError, match=message):
        kv_write(**arguments)
    assert not arguments["key_cache"].any() and not arguments["value_cache"].any()
