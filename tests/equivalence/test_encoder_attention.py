"""Attention of encoders over whole texts: FastGen's operator where texts are as long as each other, without a mask."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

import fastgen
from fastgen import settings
from fastgen.ops import packed_attention
from fastgen.optimizer.transformers.encoders import programs
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, check
from tests.equivalence.encoder_models import LONGEST, assert_close, both, build, inputs
from tests.equivalence.models import BY_NAME, LONG, padded
from tests.noting import noted

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries in each call of FastGen's attention over texts, which is the faster one."""
    if not packed_attention.is_available():
        pytest.skip("there are no kernels with vectors in this process")
    return noted(monkeypatch, packed_attention, "OPERATOR", lambda query, *others: tuple(query.shape))


@pytest.mark.parametrize("decoding", [{}, BEAM, SAMPLE], ids=["greedy", "beam", "samples"])
@pytest.mark.parametrize("name", ["bart", "marian", "m2m100"])
def test_attention_over_whole_texts(name: str, decoding: dict[str, Any], own_attention: list[tuple[int, ...]]) -> None:
    """In the encoder, once in each layer for all texts; the decoder sees what is in front alone, and the encoder."""
    model = BY_NAME[name].build()
    check(model, padded([LONG] * 3), decoding)
    assert accelerated() == 1
    layers, heads = model.config.encoder_layers, model.config.encoder_attention_heads
    assert own_attention == [(heads, 3 * LONG, model.config.d_model // heads)] * layers


@pytest.mark.parametrize("case", ["padding", "eager", "half precision", "without FastGen", "autocast"])
def test_attention_that_stays_as_it_is(case: str, own_attention: list[tuple[int, ...]]) -> None:
    model = BY_NAME["bart"].build("eager" if case == "eager" else "sdpa")
    given = padded([LONG - 1, LONG] if case == "padding" else [LONG] * 2)
    if case == "half precision":
        model = copy.deepcopy(model).bfloat16()
    inside = {"without FastGen": fastgen.disabled(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    with inside.get(case, contextlib.nullcontext()):
        model.generate(**given, max_new_tokens=3)
    assert own_attention == []


@pytest.mark.parametrize("says", ["that it is causal", "nothing"])
def test_a_module_that_may_be_causal_keeps_its_attention(says: str, own_attention: list[tuple[int, ...]]) -> None:
    """Where a module does not say it, the library makes it causal."""
    model = copy.deepcopy(BY_NAME["bart"].build())
    for layer in model.get_encoder().layers:
        layer.self_attn.is_causal = True
        if says == "nothing":
            del layer.self_attn.is_causal
    check(model, padded([LONG] * 2), {})
    assert own_attention == []


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Roberta"])
def test_large_batches_of_an_encoder(
    name: str, own_attention: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding, attention is FastGen's in each layer."""
    monkeypatch.setattr(programs, "MOST_TOKENS", 4 * LONGEST)
    model = build(name)
    assert_close(*both(model, inputs([LONGEST] * 8)))
    heads, size = model.config.num_attention_heads, model.config.hidden_size
    assert own_attention == [(heads, 8 * LONGEST, size // heads)] * model.config.num_hidden_layers


@pytest.mark.parametrize("case", ["few positions", "torch's products", "half precision", "compiled", "gradients"])
def test_an_encoder_that_stays_as_it_is(
    case: str, own_attention: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at the layers is not worth it, or FastGen has nothing for them."""
    monkeypatch.setattr(programs, "MOST_TOKENS", 4 * LONGEST)
    model = copy.deepcopy(build("Bert"))
    if case == "half precision":
        model.bfloat16()
    elif case == "compiled":
        model.compile(backend="eager")
    changes = {"packed_weights": "never"} if case == "torch's products" else {}
    with settings.changed(**changes), torch.set_grad_enabled(case == "gradients"):
        model(**inputs([LONGEST] * (2 if case == "few positions" else 8)))
    assert own_attention == []
