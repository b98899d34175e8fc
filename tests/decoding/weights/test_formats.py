"""The formats of copies: what one takes is about what its format says, on which the budget of memory goes by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastgen.decoding.weights import cache, formats

FORMATS = [
    formats.PANELS,
    formats.LM_HEAD,
    formats.DRAFT_HEAD,
    *(formats.low_bit(*each) for each in [("bf16", 32), ("int8", 32), ("int8", 128), ("int4", 32)]),
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.name} {format.itemsize}")
def test_a_copy_takes_about_what_its_format_says(format: cache.Format) -> None:
    if format.name == "bf16" and formats.unavailable("bf16") is not None:
        pytest.skip(str(formats.unavailable("bf16")))
    weight = nn.Parameter(torch.randn(1024, 512).bfloat16().float(), requires_grad=False)
    copy = cache.of(weight, format, weight)
    with cache.call():
        assert copy.optional() is not None
    assert copy.nbytes == pytest.approx(format.nbytes(weight), rel=0.1)
