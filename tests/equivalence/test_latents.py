"""Multi-head latent attention: which models have it, and what keeps a step from reading what is stored."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fastgen import patching
from fastgen.decoding.kv import growing
from fastgen.decoding.kv.view import ONE_TENSOR
from tests.equivalence.captured import captures, reasons, record_programs
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import VOCABULARY, Family, Weights
from tests.equivalence.others import KNOWN

# They have not been tried: one keeps states besides, the other reads pictures.
_UNTRIED = {"glm5_next", "hy_v4_vl"}
OPTIONS = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}

pytestmark = pytest.mark.skipif(
    "expand_kv"
    not in vars(importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3Attention),
    reason="this release makes K and V before they are stored",
)


@pytest.fixture(autouse=True)
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_programs(device, monkeypatch)


def test_all_that_have_it_are_known() -> None:
    folder = Path(transformers.__file__).parent / "models"
    found = {file.parent.name for file in folder.glob("*/modeling_*.py") if "def expand_kv" in file.read_text()}
    hooked = set()
    for name in found:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        own = (vars(kind).get("expand_kv") for kind in vars(module).values() if isinstance(kind, type))
        hooked |= {name for function in own if patching.original_of(function) is not None}
    assert found - hooked == found & _UNTRIED


def _with_bias(layer: nn.Linear) -> nn.Linear:
    layer.bias = nn.Parameter(torch.ones(layer.out_features))
    return layer


def _normed(layer: nn.Linear) -> nn.Linear:
    return weight_norm(layer).eval()


@pytest.mark.parametrize("change", [_with_bias, _normed])
def test_layers_that_are_more_than_a_weight(change: Any) -> None:
    model = copy.deepcopy(KNOWN["deepseek-v3"].build())
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = change(layer.self_attn.kv_b_proj)
    for beams in (1, 3):
        check(model, KNOWN["deepseek-v3"].make_inputs(), {**OPTIONS, "num_beams": beams})
    assert accelerated() == 2 and not captures() and set(reasons()) == {ONE_TENSOR}, reasons()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_layer_with_another_forward_pass(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the user's: it is called, also where the beams of an input share what is stored."""
    monkeypatch.setattr(growing, "MIN_SHARED_PREFIX", 0)
    monkeypatch.setattr(growing, "MIN_SHARED_BYTES", 0)
    model = copy.deepcopy(KNOWN["deepseek-v3"].build())
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        own.forward = lambda x, weight=own.weight: -nn.functional.linear(x, weight)
    check(model, KNOWN["deepseek-v3"].make_inputs(), {**OPTIONS, "num_beams": beams})


def test_one_head_with_k_and_v_of_two_sizes() -> None:
    """They look as latents do, and are none."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "v_head_dim": 6}
    config = {**sizes, **heads, "num_experts_per_tok": 2, "vocab_size": VOCABULARY, "sliding_window": 256}
    family = Family("mimo", "MiMoV2FlashForCausalLM", Weights(1), {**config, "max_position_embeddings": 512})
    for beams in (1, 3):
        for length in (9, 44, 120):
            check(family.build(), family.make_inputs(length=length), {**OPTIONS, "num_beams": beams})
    assert captures() == 6, reasons()
