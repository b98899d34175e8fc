"""Weights of 8 bits and in bfloat16 inside `generate`: used and counted, and only where they were asked for."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, LogitsProcessor

import fastgen
from fastgen import settings
from fastgen.decoding import derived_weights
from fastgen.ops.linear import choose, kernels
from tests.equivalence.cases import BEAM
from tests.equivalence.check import assert_same, run
from tests.equivalence.models import BY_NAME
from tests.equivalence.options import every
from tests.noting import noted

pytestmark = pytest.mark.sampled(2)

SCORES = {**BEAM, "output_scores": True, "return_dict_in_generate": True}


@pytest.fixture(params=choose.PRECISIONS)
def precision(request: pytest.FixtureRequest, strict: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The setting, in force; a fallback fails the test."""
    reason = choose.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    with settings.changed(weight_dtype=request.param):
        yield request.param
    derived_weights.drop_all()


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The outputs of every product with such a weight."""
    return noted(monkeypatch, kernels, "multiply_packed", lambda x, weight, bias, floats: weight.n)


@pytest.mark.parametrize("other_is_inside", [True, False])
def test_calls_in_other_threads_have_their_own_precision(
    precision: str, outputs: list[int], other_is_inside: bool
) -> None:
    """A call in float32 that begins while one with other weights runs, and the other way round."""
    model, inputs = BY_NAME["gpt2"].build(), BY_NAME["gpt2"].make_inputs(batch=2, length=9)
    with settings.changed(weight_dtype="fp32"):
        float32 = run(model, inputs, SCORES).scores[0]
        in_float32 = contextvars.copy_context()
    in_precision = contextvars.copy_context()
    rounded = run(model, inputs, SCORES).scores[0]
    assert not torch.allclose(rounded, float32, atol=1e-4)
    found: dict[str, torch.Tensor] = {}

    def call(name: str, options: dict[str, Any]) -> None:
        found[name] = run(model, inputs, {**SCORES, **options}).scores[0]

    first, second = (in_precision, in_float32) if other_is_inside else (in_float32, in_precision)
    thread = threading.Thread(target=second.run, args=(call, "second", {}))

    class Meanwhile(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not thread.ident:
                thread.start()
                thread.join(timeout=1)  # the second call may have to wait until this one ends
            return scores

    first.run(call, "first", {"logits_processor": [Meanwhile()]})
    thread.join()
    wanted = (rounded, float32) if other_is_inside else (float32, rounded)
    for name, scores in zip(("first", "second"), wanted, strict=True):
        torch.testing.assert_close(found[name], scores, rtol=0, atol=1e-5)


@every
def test_scores_are_near_those_of_float32(family: Any, precision: str, outputs: list[int], device: Any) -> None:
    if torch.device(device).type != "cpu":
        pytest.skip("on the CPU only")
    model, inputs = family.build(), family.make_inputs(batch=2, length=9)
    with fastgen.disabled():
        original = run(model, inputs, SCORES)
    assert not outputs
    ours = run(model, inputs, SCORES)
    assert model.config.get_text_config(decoder=True).vocab_size in outputs  # the head too
    scores, expected = ours.scores[0], original.scores[0]
    error = (scores - expected)[expected.isfinite()].norm() / expected[expected.isfinite()].norm()
    # In 8 bits, 0.001 (GPT-2) to 0.009 (Llama), T5 0.003; in bfloat16 at most 0.004. The bound is for other weights.
    assert 1e-6 < error < (0.2 if precision == "int4" else 0.05)
    assert fastgen.stats()[f"{precision} weights"] == {"accelerated": 1, "fallback": {}}
    assert not any("forward" in vars(module) for module in model.modules())
    # And float32 is what it was, in the next call without the setting.
    with settings.changed(weight_dtype="fp32"):
        assert_same(original, run(model, inputs, SCORES))


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _example_outputs(sources: list[str]) -> list[str]:
    """What the example model makes of some sources, as the demo has it do."""
    folder = EXAMPLES / "models" / "kjv-bart"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    inputs = tokenizer(sources, padding=True, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, num_beams=4, max_new_tokens=100)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def examples() -> tuple[list[str], list[str], list[str]]:
    """Sources, references, and what the model makes of the sources in float32."""
    texts = [(EXAMPLES / "data" / f"heldout.{name}.txt").read_text(encoding="utf-8") for name in ("src", "ref")]
    sources, references = (text.splitlines()[:64] for text in texts)
    return sources, references, _example_outputs(sources)


@pytest.mark.sampled(3)
def test_bleu_of_the_example_is_that_of_float32(
    examples: tuple[list[str], list[str], list[str]], precision: str
) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    sources, references, expected = examples
    fastgen.reset_stats()
    found = _example_outputs(sources)
    assert fastgen.stats()[f"{precision} weights"]["accelerated"] == 1
    bleu, wanted = (sacrebleu.corpus_bleu(outputs, [references]).score for outputs in (found, expected))
    assert wanted > 70 and abs(bleu - wanted) <= 0.3
