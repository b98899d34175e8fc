"""FastGen's kernels for layers inside `generate`: they are used, tokens are the library's, and nothing stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

import fastgen
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.layer_forms import FloatLinear
from fastgen.ops import elementwise
from fastgen.ops.linear import choose
from tests.equivalence.cases import BEAM
from tests.equivalence.check import accelerated, assert_same, check, run
from tests.equivalence.options import every
from tests.equivalence.others import made
from tests.equivalence.test_failures import break_
from tests.noting import noted
from tests.ops.instructions import has_tiles

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")


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


@pytest.mark.skipif(not elementwise.is_available(), reason="the extension was not built")
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("length", "calls"), [(100, 2), (5, 0)])
def test_gelu_of_a_long_prompt(beams: int, length: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one runs in FastGen's kernel, once in each layer."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=2, n_inner=256, bos_token_id=1, eos_token_id=2)
    model, ids = GPT2LMHeadModel(config).eval(), torch.randint(1, 100, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    sizes = noted(monkeypatch, elementwise, "bound", lambda found: [each.out.numel() for each in found])
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    check(model, {"input_ids": ids, "attention_mask": mask}, options)
    assert sum(size > 2**15 for each in sizes for size in each) == calls


@pytest.mark.skipif(not has_tiles(), reason="this processor has no AMX tiles")
@pytest.mark.parametrize("options", [BEAM, {"num_beams": 1, "max_new_tokens": 16}], ids=["beams", "greedy"])
@pytest.mark.parametrize("name", ["bart", "t5", "llama", "opt"])
def test_products_in_three_parts_of_bfloat16(
    name: str, options: dict[str, Any], strict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AMX tiles: everywhere, prefill and steps of many rows included."""
    used, chosen = list[bool](), choose.kernel_for

    def kernel_for(*given: Any) -> Any:
        kernel = chosen(*given)
        used.append(kernel is not None and kernel.name == "bf16x3")
        return kernel

    monkeypatch.setattr(choose, "kernel_for", kernel_for)
    for _ in range(2):
        check(*made(name), options)
    assert any(used) and accelerated() == 2
