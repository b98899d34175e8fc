"""FastGen's own UniLM with the patches and without: the same tokens, and always accelerated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen import releases
from tests.equivalence.captured import captures, reasons, record_programs
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.conftest import SharedPrefixes
from tests.models.tiny_unilm import batch, sources, tiny_model

pytestmark = pytest.mark.sampled(4)

# Whose targets end at different steps.
LENGTHS = (44, 12, 30, 37)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_p": 0.95, "temperature": 1.3},
    "sampling, 3 returned": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "2 beams": {"num_beams": 2},
    "3 beams": {"num_beams": 3, "length_penalty": 0.0},
    "4 beams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "5 beams": {"num_beams": 5, "num_return_sequences": 5, "early_stopping": True},
    "4 beams, n-grams": {"num_beams": 4, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
    "4 beams, at least 9": {"num_beams": 4, "min_new_tokens": 9, "repetition_penalty": 1.2},
    "4 beams, never stop early": {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "words that are banned": {"num_beams": 4, "bad_words_ids": [[7], [12, 13]], "suppress_tokens": list(range(30, 40))},
    "no end": {"num_beams": 4, "eos_token_id": None},
    "one token": {"num_beams": 4, "max_new_tokens": 1},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(end=3.0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(model: Any, name: str, side: str, strict: None, shared_prefixes: SharedPrefixes) -> None:
    options = {"max_new_tokens": 14, **OPTIONS[name]}
    found = check(model, batch(sources(*LENGTHS), side), options)
    assert accelerated() == 1
    assert not shared_prefixes.full, "a shared prefix was made into a full tensor"
    several = max(options.get("num_beams", 1), options.get("num_return_sequences", 1)) > 1
    assert bool(shared_prefixes.made) == (several and options["max_new_tokens"] > 1)
    assert len({tuple(row) for row in found.tolist()}) > 1


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_everything_that_is_returned(kind: str, strict: None) -> None:
    options = {
        "num_beams": 3,
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": kind == "eager",
    }
    found = check(tiny_model(attn_implementation=kind), batch(sources(*LENGTHS)), options)
    assert accelerated() == 1
    assert releases.cache_in(found).self_attention_cache.get_seq_length() == max(LENGTHS) + 5, (
        "a [MASK] is in the cache"
    )


def test_without_a_cache_it_falls_back(model: Any) -> None:
    check(model, batch(sources(20, 10)), {"num_beams": 3, "max_new_tokens": 4, "use_cache": False})
    assert list(fallbacks()) == ["no K/V cache (use_cache=False)"]


def test_more_positions_than_there_are(device: torch.device, monkeypatch: pytest.MonkeyPatch, counted: None) -> None:
    """The model says so in the step that has none left: no captured step takes its place."""
    record_programs(device, monkeypatch)
    model, given = tiny_model(max_position_embeddings=40), batch(sources(20, 8))
    options = {"min_new_tokens": 30, "max_new_tokens": 30, "do_sample": False}
    with pytest.raises(ValueError, match="positions together, but the model has 40"):
        model.generate(**given, **options)
    assert not captures() and "more positions than the model has" in reasons()
    model.generate(**given, **{**options, "min_new_tokens": 15, "max_new_tokens": 15})
    assert captures() == 1
