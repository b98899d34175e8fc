"""Captured steps of models whose own code asks the host, or tiles heads: experts that are modules, and relatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastgen
from fastgen import counters, settings
from fastgen.ops.linear import choose
from tests.equivalence.captured import captures, reasons, record_programs
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.others import KNOWN

NAMES = [name for name in ("switch-experts", "jetmoe", "diffllama", "t5gemma") if name in KNOWN]
NEW = {"max_new_tokens": 20, "min_new_tokens": 16}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True},
}
SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.fixture(autouse=True)
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_programs(device, monkeypatch)


@pytest.mark.parametrize("step", ["always", "never"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_librarys(name: str, way: str, step: str) -> None:
    with settings.changed(captured_step=step):
        for shape in ({}, {"length": 60}, {"batch": 1}):
            check(KNOWN[name].build(), KNOWN[name].make_inputs(**shape), {**NEW, **WAYS[way], **SCORES})
    assert accelerated() == 3 and not fallbacks()
    assert captures() == (3 if step == "always" else 0), reasons()


class _Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.skipif("switch-experts" not in KNOWN, reason="this release has no such model")
@pytest.mark.parametrize("change", ["another class", "another forward pass", "a bias", "another activation"])
def test_experts_that_are_more_than_two_weights(change: str) -> None:
    """They run on their own code."""
    model = copy.deepcopy(KNOWN["switch-experts"].build())
    expert = model.decoder.block[1].layer[2].mlp.experts["expert_1"]
    if change == "another class":
        wi = _Doubled(expert.wi.in_features, expert.wi.out_features, bias=False)
        wi.load_state_dict(expert.wi.state_dict())
        expert.wi = wi
    elif change == "another forward pass":
        expert.wi.forward = lambda x, weight=expert.wi.weight: 2 * nn.functional.linear(x, weight)
    elif change == "a bias":
        expert.wi.bias = nn.Parameter(torch.ones(expert.wi.out_features))
    else:
        expert.act = nn.GELU()
    check(model, KNOWN["switch-experts"].make_inputs(), {**NEW, "do_sample": False})
    assert not captures() and sum(reasons().values()) + sum(fallbacks().values()) == 1


@pytest.mark.skipif("switch-experts" not in KNOWN, reason="this release has no such model")
@pytest.mark.parametrize("capacity", [1, 64])
def test_the_capacity_of_an_expert(capacity: int) -> None:
    """It counts the tokens of a sequence in a pass: those of a verify could exceed it."""
    model = copy.deepcopy(KNOWN["switch-experts"].build())
    model.config.expert_capacity = capacity
    for block in (*model.encoder.block, *model.decoder.block):
        router = getattr(block.layer[-1].mlp, "router", None)
        if router is not None:
            router.expert_capacity = capacity
    with settings.changed(self_speculation="int8"):
        check(model, KNOWN["switch-experts"].make_inputs(), {"max_new_tokens": 40, "min_new_tokens": 20})
    assert captures() == 1
    why = list(fastgen.stats()[counters.DRAFTS].get("not used", {}))
    assert ("experts that take fewer tokens of a sequence than a verify has" in why) == (capacity == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_experts(dtype: torch.dtype) -> None:
    """Some have none, and the last rows belong to none."""
    x, ends = torch.randn(9, 16).to(dtype), torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    weights = [torch.randn(5, 16).to(dtype) for _ in range(4)]
    wanted = torch.zeros(9, 5, dtype=dtype)
    wanted[:4], wanted[4:7] = x[:4] @ weights[1].t(), x[4:7] @ weights[3].t()
    torch.testing.assert_close(choose.separate_linear(x, weights, ends), wanted, atol=1e-1, rtol=2e-2)
