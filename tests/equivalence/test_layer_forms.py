"""Forms of layers inside `generate`: they are used, they follow the weights, and nothing stays on the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import fastgen
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.layer_forms import FloatLinear
from fastgen.ops.linear import choose, kernels
from tests.equivalence.cases import BEAM
from tests.equivalence.check import assert_same, check, run
from tests.equivalence.options import every
from tests.equivalence.others import made
from tests.equivalence.test_failures import break_
from tests.noting import noted

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="the extension was not built")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The outputs of every product of a layer that has a kernel of FastGen's."""
    return noted(monkeypatch, choose, "kernel_for", lambda x, weight, bias: weight.shape[0])


def installed(model: Any) -> int:
    return sum(isinstance(vars(module).get("forward"), FloatLinear) for module in model.modules())


@every
def test_they_are_used_and_nothing_stays(family: Any, products: list[int], strict: None, device: Any) -> None:
    if torch.device(device).type != "cpu":
        pytest.skip("layers have forms on the CPU only")
    model = family.build()
    check(model, family.make_inputs(batch=2, length=9), BEAM)
    assert model.config.get_text_config(decoder=True).vocab_size in products  # the head too
    assert installed(model) == 0


class Doubles(LogitsProcessor):
    """Doubles the weights of the head at the third step."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self.head, self.step = head, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.step == 3:
            self.head.weight.mul_(-1.0)
        return scores


@every
def test_a_weight_that_changes_in_the_middle(family: Any, strict: None) -> None:
    model, inputs = family.build(), family.make_inputs(batch=2, length=9)
    head = model.get_output_embeddings()
    results = []
    for context in (fastgen.disabled(), None):
        before = head.weight.detach().clone()
        options = {**BEAM, "max_new_tokens": 8, "logits_processor": [Doubles(head)]}
        with context or torch.no_grad():
            results.append(run(model, inputs, options))
        with torch.no_grad():
            head.weight.copy_(before)
    assert_same(*results)


def test_a_failed_call_and_a_declined_one_run_on_the_original(
    products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = made("gpt2", batch=2, length=9)
    break_(monkeypatch, GrowingKV, "expand", 1)
    with pytest.warns(RuntimeWarning, match="planted"):
        run(model, inputs, BEAM)
    prompt = len(products)
    assert prompt and installed(model) == 0
    run(model, inputs, {**BEAM, "use_cache": False})
    assert len(products) == prompt and installed(model) == 0
