"""What a hook raises while it decides ends in the original code: counted, warned of, and raised in strict mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.generation import MinLengthLogitsProcessor, NoRepeatNGramLogitsProcessor

import fastgen
from fastgen.decoding.captured import graph
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers.captured import graph_cache, pays
from tests.equivalence.cases import BEAM
from tests.equivalence.encoder_models import build, inputs
from tests.equivalence.models import BY_NAME

HOOKS = "fastgen.optimizer.transformers"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    monkeypatch.setattr(pays, "PASSES", 1)
    graph_cache.drop_all()
    fastgen.enable(strict=False)
    fastgen.reset_stats()
    yield
    fastgen.enable(padding="exact", captured_step="auto")


def _generated(name: str, **options: Any) -> Callable[[], Any]:
    family = BY_NAME[name]
    return lambda: family.build().generate(**family.make_inputs(), **{"max_new_tokens": 9, **options})


def _drawn(name: str, **options: Any) -> Callable[[], Any]:
    call = _generated(name, do_sample=True, **options)
    return lambda: (torch.manual_seed(0), call())[1]


def _classified(**options: Any) -> Any:
    with torch.inference_mode():
        return build("Bert", "SequenceClassification")(**inputs([3, 20, 9]), **options).logits


def _short() -> Any:
    with torch.inference_mode():
        return build("Bert")(**inputs([5, 5])).last_hidden_state


def _processed(processor: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (3, 12), generator=generator)
    return processor(ids, torch.randn(3, 9, generator=generator))


# Something in each decision that a hook makes, where a user's call gets there, and under which name it is counted.
GENERATE = "transformers.generate"
ENCODER = "transformers.encoder"
DECISIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "generate:_unsupported": (_generated("bart"), GENERATE),
    "loop:_check": (_generated("llama"), GENERATE),
    "buckets:_buckets": (_generated("bart"), GENERATE),
    "prefill:_one_row_each": (_generated("llama", **BEAM), GENERATE),
    "call:FastLayers.enter": (_generated("llama"), GENERATE),
    "logits:_ngrams": (lambda: _processed(NoRepeatNGramLogitsProcessor(2)), "transformers.no_repeat_ngram"),
    "logits:_banned": (_generated("llama", min_length=20), "transformers.min_length"),
    "logits:_sorted_fast": (_drawn("llama", top_p=0.8), "transformers.top_p"),
    "encoders.call:known_of": (_classified, ENCODER),
    "encoders.call:UnpaddedForward.__init__": (_classified, ENCODER),
    "encoders.programs:_may_have_padding": (_short, f"{ENCODER}, recorded"),
    "encoders.programs:_serves": (_short, f"{ENCODER}, recorded"),
    "encoders.programs:_is_due": (_short, f"{ENCODER}, recorded"),
}


def _break(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"{HOOKS}.{module}")
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("place", DECISIONS)
def test_a_decision_that_fails(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, entry_point = DECISIONS[place]
    if place.startswith("logits:"):  # a captured step has processors of its own
        monkeypatch.setattr(graph, "unavailable", lambda device: "the library's processors are to run")
    with fastgen.disabled():
        expected = call()
    graph_cache.drop_all()
    _break(monkeypatch, place)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError.*planted"):
        found = call()
    torch.testing.assert_close(found, expected)
    reasons = fastgen.stats()[entry_point]["fallback"]
    assert isinstance(reasons, dict) and any("ZeroDivisionError" in reason for reason in reasons)
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match="planted"):
        call()


@pytest.mark.parametrize(
    "processor",
    [NoRepeatNGramLogitsProcessor(2**40), NoRepeatNGramLogitsProcessor(2**70), NoRepeatNGramLogitsProcessor(13)],
)
def test_ngrams_longer_than_anything(processor: Any) -> None:
    with fastgen.disabled():
        expected = _processed(processor)
    assert torch.equal(_processed(processor), expected)
    assert not fastgen.stats()["transformers.no_repeat_ngram"]["fallback"]


def test_a_minimum_length_outside_of_generate_is_the_librarys() -> None:
    processor = MinLengthLogitsProcessor(20, 2, device="cpu")
    with fastgen.disabled():
        expected = _processed(processor)
    assert torch.equal(_processed(processor), expected)
