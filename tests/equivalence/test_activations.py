"""Activations in the prefill of a call, where their tensors are large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fastgen
from fastgen.ops import elementwise
from tests.noting import noted

pytestmark = pytest.mark.skipif(not elementwise.is_available(), reason="the extension was not built")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=2, n_inner=256)).eval()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("rows", "length", "calls"), [(2, 100, 2), (2, 5, 0)])
def test_gelu_of_a_long_prompt(
    model: Any, beams: int, rows: int, length: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones run in FastGen's kernel, once in each layer, and tokens are those of the library."""
    ids = torch.randint(1, 100, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    with fastgen.disabled():
        expected = model.generate(ids, **given)
    sizes = noted(monkeypatch, elementwise, "bound", lambda found: [each.out.numel() for each in found])
    assert torch.equal(model.generate(ids, **given), expected)
    assert sum(size > 2**15 for each in sizes for size in each) == calls
