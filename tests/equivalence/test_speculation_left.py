"""Drafts that are asked for where the library raises, or gives other tokens than without: its own code has the call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import fastgen
from tests.equivalence.check import check
from tests.equivalence.speculation import GREEDY, KNOWN, counts

pytestmark = pytest.mark.usefixtures("speculates_at_once")

DRAFTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "lookup": lambda name: {"prompt_lookup_num_tokens": 3},
    "assistant": lambda name: {"assistant_model": KNOWN["bart" if name == "bart" else "qwen2"].build()},
    "early exit": lambda name: {"assistant_early_exit": 1},
}


def _embedded(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "inputs_embeds": KNOWN["llama"].build().get_input_embeddings()(inputs["input_ids"]).detach()}


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def _left(name: str, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    """Asserts that both raise the same or have the same tokens, and that nothing of FastGen's has drafted."""

    def call() -> Any:
        model = copy.deepcopy(KNOWN[name].build())  # an early exit that raises leaves the library's with fewer layers
        return _outcome(lambda: model.generate(**inputs, **GREEDY, **options))

    with fastgen.disabled():
        expected = call()
    found = call()
    assert str(found) == str(expected)
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"assisted decoding": 1}
    assert counts()["accelerated"] == 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_embeddings_beside_tokens(draft: str) -> None:
    _left("llama", _embedded(KNOWN["llama"].make_inputs(1)), DRAFTS[draft]("llama"))


@pytest.mark.parametrize("draft", DRAFTS)
def test_embeddings_alone(draft: str) -> None:
    """An assistant has no tokens to go on from, and raises."""
    inputs = _embedded(KNOWN["llama"].make_inputs(1))
    del inputs["input_ids"]
    _left("llama", inputs, DRAFTS[draft]("llama"))


@pytest.mark.parametrize("draft", ["lookup", "assistant"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_no_cache(name: str, draft: str) -> None:
    _left(name, KNOWN[name].make_inputs(1), {"use_cache": False, **DRAFTS[draft](name)})


def test_no_cache_by_the_models_own_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN["llama"].build().generation_config, "use_cache", False)
    _left("llama", KNOWN["llama"].make_inputs(1), {"prompt_lookup_num_tokens": 3})


def test_several_sequences_of_embeddings() -> None:
    """The library has no drafts for them: FastGen's give the tokens of a call without."""
    options, inputs = DRAFTS["lookup"]("llama"), _embedded(KNOWN["llama"].make_inputs(3))
    model = KNOWN["llama"].build()
    with fastgen.disabled():
        expected = model.generate(**inputs, **GREEDY)
    assert model.generate(**inputs, **GREEDY, **options).tolist() == expected.tolist()
    assert counts()["accelerated"] == 1


@pytest.mark.parametrize("draft", ["lookup", "assistant"])
def test_a_cache_that_is_asked_for_is_drafted_with(draft: str) -> None:
    options = {**GREEDY, "use_cache": True, **DRAFTS[draft]("llama")}
    check(KNOWN["llama"].build(), KNOWN["llama"].make_inputs(1), options)
    assert counts()["accelerated"] == 1
