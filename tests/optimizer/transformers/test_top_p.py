"""Top-p sampling with a vocabulary that the radix sort serves: the library's tokens, in each way of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, TopPLogitsWarper

import fastgen
from fastgen.ops import _library, gpu
from fastgen.optimizer.transformers.captured import graph_cache

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
COUNTED = "transformers.top_p"
VOCABULARY = 3000


@pytest.fixture(autouse=True)
def steps_are_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)
    fastgen.reset_stats()
    yield
    fastgen.enable()
    graph_cache.drop_all()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
    config.initializer_range = 0.3  # the distribution is not flat
    return LlamaForCausalLM(config).eval()


def drawn(model: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    ids = torch.arange(2, 14).view(2, 6)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=True, **options)


OPTIONS = [
    {"top_p": 0.9},
    {"top_p": 0.3, "top_k": 0},
    {"top_p": 0.7, "temperature": 1.7, "num_beams": 2},
    {"top_p": 0.95, "top_k": 20, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True},
]


@pytest.mark.parametrize("captured_step", ["never", "always"])
@pytest.mark.parametrize("options", OPTIONS)
def test_same_tokens(model: Any, options: dict[str, Any], captured_step: str) -> None:
    with fastgen.disabled():
        expected = drawn(model, **options)
    fastgen.enable(captured_step=captured_step, strict=True)
    found = drawn(model, **options)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences)
    for own, other in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(own, other)
        assert torch.equal(own.isinf(), other.isinf())


def test_hooks_use_the_operator(model: Any) -> None:
    fastgen.enable(captured_step="never")
    drawn(model, top_p=0.9)
    assert fastgen.stats()[COUNTED]["accelerated"] > 0


class Keeps(LogitsProcessor):
    """Holds the scores that it is given, as a user's may."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append((scores, scores.clone()))
        return scores


@pytest.mark.parametrize("captured_step", ["never", "always"])
def test_scores_that_somebody_holds_stay(model: Any, captured_step: str) -> None:
    fastgen.enable(captured_step=captured_step)
    keeps = Keeps()
    drawn(model, top_p=0.5, logits_processor=[keeps])
    assert keeps.seen and all(torch.equal(held, copy) for held, copy in keeps.seen)


def test_outside_of_a_call_it_is_the_librarys() -> None:
    scores = torch.randn(2, VOCABULARY)
    before = scores.clone()
    TopPLogitsWarper(0.5)(None, scores)
    assert torch.equal(scores, before) and not fastgen.stats().get(COUNTED, {}).get("accelerated")


@pytest.mark.parametrize("captured_step", ["never", "always"])
def test_in_bfloat16(model: Any, captured_step: str) -> None:
    """Of equal scores at the edge, other ones may stay: as many, and no token that has not been kept."""
    half = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    fastgen.enable(captured_step=captured_step, strict=True)
    found = drawn(half, top_p=0.6, top_k=0, return_dict_in_generate=True, output_scores=True, output_logits=True)
    for logits, scores in zip(found.logits, found.scores, strict=True):
        with fastgen.disabled():
            expected = TopPLogitsWarper(0.6)(None, logits.float())
        assert torch.equal(scores.isinf().sum(-1), expected.isinf().sum(-1))
        kept = scores.masked_fill(scores.isinf(), torch.inf).amin(-1)
        assert torch.equal(kept, expected.masked_fill(expected.isinf(), torch.inf).amin(-1))
