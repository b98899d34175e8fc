"""Drafts that are left to the library: where it raises, where its drafts return other tokens, or with other options."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

import fastgen
from tests.equivalence.check import check, fallbacks
from tests.equivalence.models import SHORT
from tests.equivalence.others import made
from tests.equivalence.speculation import GREEDY, KNOWN, counts, same

pytestmark = pytest.mark.usefixtures("speculates_at_once")
Given = dict[str, Any]


def _drafts(draft: str, name: str) -> Given:
    if draft == "assistant":
        return {"assistant_model": KNOWN["bart" if name == "bart" else "qwen2"].build()}
    return {"prompt_lookup_num_tokens": 3} if draft == "lookup" else {"assistant_early_exit": 1}


# ---- inputs


def _tokens(name: str) -> Given:
    return KNOWN[name].make_inputs(1, SHORT)


def _several(name: str) -> Given:
    return KNOWN[name].make_inputs(2, SHORT)


def _with_embeddings(name: str, rows: int = 1) -> Given:
    model, inputs = made(name, rows)
    return {**inputs, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}


def _embeddings(name: str) -> Given:
    inputs = _with_embeddings(name)
    del inputs["input_ids"]
    return inputs


def _encoded(name: str) -> Given:
    """The assistant's encoder has nothing to read."""
    model, inputs = made(name, 1, SHORT)
    with fastgen.disabled(), torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    return {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}


# ---- processors that remember what was drafted: their scores differ from those without a draft


def _watermark() -> Given:
    return {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 11])}


def _processor() -> Given:
    return {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, KNOWN["llama"].build())]}


ALL, TWO = ("lookup", "assistant", "early exit"), ("lookup", "assistant")
# By name of the case: the model, its inputs, the options, and what drafts.
LEFT: dict[str, tuple[str, Callable[[str], Given], Callable[[], Given], tuple[str, ...]]] = {
    "embeddings beside tokens": ("llama", _with_embeddings, dict, ALL),
    "embeddings, from which an assistant cannot go on": ("llama", _embeddings, dict, ALL),
    "an encoder's output": ("bart", _encoded, dict, ("assistant",)),
    "no cache": ("llama", _tokens, lambda: {"use_cache": False}, TWO),
    "no cache, with an encoder": ("bart", _tokens, lambda: {"use_cache": False}, TWO),
    "a static cache": ("llama", _tokens, lambda: {"cache_implementation": "static"}, ("lookup",)),
    "a static cache, with an encoder": ("bart", _tokens, lambda: {"cache_implementation": "static"}, ("lookup",)),
    "hidden states": ("llama", _tokens, lambda: {"output_hidden_states": True}, ("lookup",)),
    "guidance": ("llama", _tokens, lambda: {"guidance_scale": 1.5}, TWO),
    "a watermark": ("llama", _tokens, _watermark, TWO),
    "a processor with a model": ("llama", _tokens, _processor, TWO),
    "a model that assists another one": ("llama", _several, lambda: {"is_assistant": True}, TWO),
}


def _outcome(name: str, inputs: Given, options: Callable[[], Given]) -> Any:
    model = copy.deepcopy(KNOWN[name].build())  # it keeps a static cache, and fewer layers if an early exit raises
    try:
        return model.generate(**copy.deepcopy(inputs), **GREEDY, **options())
    except Exception as error:
        return type(error), str(error)


def _assert_left(name: str, inputs: Given, options: Callable[[], Given]) -> None:
    """Asserts that the library runs the call: the same tokens, or the same error."""
    with fastgen.disabled():
        expected = _outcome(name, inputs, options)
    assert str(_outcome(name, inputs, options)) == str(expected)
    assert fallbacks() == {"assisted decoding": 1}
    assert counts()["accelerated"] == 0


@pytest.mark.parametrize(("case", "draft"), [(case, draft) for case, (*_, drafts) in LEFT.items() for draft in drafts])
def test_the_library_drafts(case: str, draft: str) -> None:
    name, make_inputs, options, _ = LEFT[case]
    _assert_left(name, make_inputs(name), lambda: {**options(), **_drafts(draft, name)})


def test_no_cache_by_the_models_own_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN["llama"].build().generation_config, "use_cache", False)
    _assert_left("llama", _tokens("llama"), lambda: _drafts("lookup", "llama"))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"output_hidden_states": True, "return_dict_in_generate": True}])
def test_calls_without_a_self_draft(options: Given) -> None:
    fastgen.enable(self_speculation="int8")
    same(*made("llama", 2), options)
    assert counts()["accelerated"] == 0 and fallbacks() == {}


def test_several_sequences_of_embeddings() -> None:
    """The library cannot draft for them. FastGen's drafts lead to the tokens of a call without a draft."""
    same(KNOWN["llama"].build(), _with_embeddings("llama", 3), {}, **_drafts("lookup", "llama"))
    assert counts()["accelerated"] == 1


@pytest.mark.parametrize("draft", TWO)
def test_a_cache_that_is_asked_for_is_drafted_with(draft: str) -> None:
    check(*made("llama", 1), {**GREEDY, "use_cache": True, **_drafts(draft, "llama")})
    assert counts()["accelerated"] == 1
