"""Weights in groups: what they stand for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen.quantization.checkpoint import QuantizedTensor, check, dequantized
from tests.quantization.definitions import by_definition, random_weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", ["symmetric", "zeros", "mins"])
@pytest.mark.parametrize("sizes", [(3, 32, 4, 16), (1, 7, 8, 7), (5, 9, 4, 3), (0, 32, 4, 16)], ids=str)
def test_dequantized(sizes: tuple[int, int, int, int], form: str, act_order: bool, dtype: torch.dtype) -> None:
    kind = {"symmetric": form != "zeros", "mins": form == "mins", "act_order": act_order}
    weight = random_weight(*sizes, **kind, dtype=dtype)
    near = {"rtol": 1e-5, "atol": 1e-6} if form == "mins" else {"rtol": 1e-6, "atol": 0}
    torch.testing.assert_close(dequantized(weight, torch.float32).double(), by_definition(weight), **near)
    assert torch.equal(dequantized(weight, dtype), dequantized(weight, torch.float32).to(dtype))


WEIGHT = random_weight(4, 32, symmetric=False, act_order=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"qweight": WEIGHT.qweight.int()}, "qweight is int32"),
        ({"qweight": WEIGHT.qweight[0]}, r"qweight is uint8 \[32\]"),
        ({"group_size": 12}, "32 in_features are not whole groups of 12"),
        ({"group_size": 0}, "not whole groups of 0"),
        ({"scales": WEIGHT.scales[:3]}, r"scales are float16 \[3, 2\]"),
        ({"scales": WEIGHT.scales.double()}, "scales are float64"),
        ({"zeros": WEIGHT.scales}, "zeros are float16"),
        ({"mins": WEIGHT.scales}, "zeros or mins, not both"),
        ({"zeros": None, "mins": WEIGHT.scales[:, :1]}, r"mins are float16 \[4, 1\]"),
        ({"order": torch.arange(31)}, r"the order is int64 \[31\]"),
        ({"order": torch.arange(32).int()}, "the order is int32"),
        ({"order": torch.zeros(32, dtype=torch.int64)}, "does not name each of the 32 in_features once"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    broken: QuantizedTensor = WEIGHT._replace(**change)
    for function in (check, lambda weight: dequantized(weight, torch.float32)):
        with pytest.raises(ValueError, match=message) as error:
            function(broken)
        assert "\n" not in str(error.value)
