"""Mixtures of experts: inside a call their linear ops are FastGen's operator, and the tokens those of the library."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch

import fastgen
from fastgen.ops.linear import choose
from tests.equivalence.captured import captures, record_programs
from tests.equivalence.check import accelerated, check
from tests.equivalence.others import KNOWN
from tests.noting import noted

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}

pytestmark = pytest.mark.skipif(
    choose.gemv_rows(torch.float32, choose.Layout.ROWS, 1) is None, reason="torch's products serve this instruction set"
)


@pytest.fixture
def multiplied(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types that the operator has been called with, by Python code: not in a replayed step."""
    if device.type != "cpu":
        pytest.skip("the operator is one of the CPU")
    record_programs(device, monkeypatch)
    return noted(monkeypatch, choose, "expert_linear", lambda x, *rest: x.dtype)


@pytest.mark.parametrize("step", ["always", "never"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_tokens_are_the_librarys(name: str, beams: int, step: str, multiplied: list[torch.dtype]) -> None:
    fastgen.enable(captured_step=step)
    model, inputs = KNOWN[name].build(), KNOWN[name].make_inputs()
    check(model, inputs, {**OPTIONS, "num_beams": beams})
    assert accelerated() == 1 and captures() == (step == "always")
    assert "experts" not in fastgen.stats()  # no product has failed
    products = 2 * model.config.num_hidden_layers
    if step == "always":  # the prefill, and steps until one is recorded
        assert products < len(multiplied) < products * OPTIONS["max_new_tokens"]
    else:
        assert len(multiplied) == products * OPTIONS["max_new_tokens"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, multiplied: list[torch.dtype]) -> None:
    model = copy.deepcopy(KNOWN["mixtral"].build()).to(dtype)
    if choose.gemv_rows(dtype, choose.Layout.ROWS, 1) is None:
        pytest.skip("torch's products serve this type")
    found = model.generate(**KNOWN["mixtral"].make_inputs(), **OPTIONS)
    assert found.shape[1] > 12 and set(multiplied) == {dtype}


def test_only_inside_a_call(multiplied: list[torch.dtype]) -> None:
    """A forward pass of the user's has the library's bits, and so has training."""
    model, inputs = KNOWN["mixtral"].build(), KNOWN["mixtral"].make_inputs()
    with torch.no_grad():
        model(**inputs)
    model(**inputs).logits.sum().backward()
    fastgen.enable(packed_weights="never")
    model.generate(**inputs, **OPTIONS)
    assert not multiplied
    fastgen.enable(packed_weights="call")
    model.generate(**inputs, **OPTIONS)
    assert multiplied


def test_a_weight_of_another_kind(multiplied: list[torch.dtype]) -> None:
    """A subclass of tensors may have products of its own; another model's weights are not those of the call."""
    model, inputs = copy.deepcopy(KNOWN["mixtral"].build()), KNOWN["mixtral"].make_inputs()

    class Weight(torch.Tensor):
        pass

    for layer in model.model.layers:
        own = layer.mlp.experts
        own.gate_up_proj = torch.nn.Parameter(own.gate_up_proj.data.as_subclass(Weight))
        own.down_proj = torch.nn.Parameter(own.down_proj.data.as_subclass(Weight))
    other = KNOWN["qwen2-moe"].build()

    def criterion(ids: torch.Tensor, scores: object) -> torch.Tensor:
        other(ids % other.config.vocab_size)
        return torch.zeros(len(ids), dtype=torch.bool)

    check(model, inputs, lambda: {**OPTIONS, "stopping_criteria": [criterion]})
    assert not multiplied


def test_a_failure_is_the_librarys_product(multiplied: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("planted")

    model, inputs = KNOWN["mixtral"].build(), KNOWN["mixtral"].make_inputs()
    monkeypatch.setattr(choose, "expert_linear", fails)
    check(model, inputs, OPTIONS)
    assert accelerated() == 1 and fastgen.stats()["experts"]["fallback"]["RuntimeError: planted"]


def test_in_slots_of_an_engine(multiplied: list[torch.dtype]) -> None:
    model, inputs = KNOWN["mixtral"].build(), KNOWN["mixtral"].make_inputs()
    rows = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    with fastgen.disabled():
        expected = [model.generate(row[None], **OPTIONS)[0] for row in rows]
    with fastgen.Engine(model, slots=4) as engine:
        found = engine.generate([{"input_ids": row[None]} for row in rows], **OPTIONS)
    assert all(torch.equal(a[0], b) for a, b in zip(found, expected, strict=True))
    # Prefills, and a step or two before each recording: replays call no Python code.
    assert 0 < len(multiplied) < 2 * model.config.num_hidden_layers * OPTIONS["max_new_tokens"]


def test_the_hooked_function_is_there() -> None:
    module = importlib.import_module("transformers.integrations.moe")
    assert "_grouped_mm(input, weight" in inspect.getsource(module._grouped_linear)
