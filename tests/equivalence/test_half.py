"""Half precision: accelerated, and sound. That the tokens are those of the original is promised for float32 only.

In half precision two orders of summation differ in the third digit, so a search may take another path now and then.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fastgen
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, run
from tests.equivalence.models import BY_NAME, Family
from tests.equivalence.options import every
from tests.ops.torch_attention import skipped_where_torch_fails

FAMILIES = [
    BY_NAME[name] for name in ("prophetnet", "bart", "t5", "whisper", "gpt2", "bloom", "llama", "gemma2", "gpt-oss")
]

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(3)]


@pytest.mark.parametrize("decoding", [BEAM, SAMPLE], ids=["beam", "sample"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_half(family: Family, dtype: torch.dtype, decoding: dict[str, Any]) -> None:
    model = copy.deepcopy(family.build()).to(dtype)
    inputs = family.make_inputs()
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    options = {**decoding, "return_dict_in_generate": True, "output_scores": True, "min_new_tokens": 12}
    with skipped_where_torch_fails(dtype):
        with fastgen.disabled():
            original = run(model, inputs, options)
        ours = run(model, inputs, options)
    assert accelerated() == 1
    assert ours.sequences.shape == original.sequences.shape
    assert [(s.shape, s.dtype) for s in ours.scores] == [(s.shape, s.dtype) for s in original.scores]
    assert not any(scores.isnan().any() for scores in ours.scores)
    # The first step has gone through the prompt only: its scores differ by rounding, and nothing else.
    first, other = (result.scores[0].float().clamp(min=-50) for result in (original, ours))
    assert (first - other).abs().max() < (0.3 if dtype is torch.bfloat16 else 0.05)


@pytest.mark.parametrize("decoding", [BEAM, SAMPLE], ids=["beam", "sample"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@every
def test_autocast(family: Family, attention: str, decoding: dict[str, Any]) -> None:
    """Parameters in float32, products in bfloat16."""
    options = {**decoding, "return_dict_in_generate": True, "output_scores": True, "min_new_tokens": 12}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with fastgen.disabled():
            original = run(family.build(attention), family.make_inputs(), options)
        ours = run(family.build(attention), family.make_inputs(), options)
    assert accelerated() == 1
    assert ours.sequences.shape == original.sequences.shape
    assert (ours.scores[0].clamp(min=-50) - original.scores[0].clamp(min=-50)).abs().max() < 0.3
