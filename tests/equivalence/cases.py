"""The core cases of the grid: the ways of decoding, and the shapes of the batch."""

from __future__ import annotations

from typing import Any

from transformers import WatermarkingConfig

from tests.equivalence.models import EOS, LONG, SHORT, VOCABULARY, Family

# Ways of decoding. All of them run for every model.
DECODING: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 4},
    "beam, 3 returned": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, "do_sample": True, "top_k": 0},
    "sampling, 4 returned": {"do_sample": True, "num_return_sequences": 4, "top_k": 50},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.95},
    "greedy": {},
}


def draws_others(given: dict[str, Any]) -> bool:
    """Of the parameters of a test, whether it is skipped: other samples are drawn in a graph than without one."""
    options = given.get("options", DECODING.get(given.get("decoding", ""), {}))
    return given.get("way") == "graphs" and isinstance(options, dict) and bool(options.get("do_sample"))


# Shapes of the batch, as arguments of `Family.make_inputs`.
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"batch": 3, "length": LONG},
    "short": {"batch": 3, "length": SHORT},
    "one": {"batch": 1, "length": LONG},
    "padded on the other side": {"batch": 3, "length": LONG, "padding": "right"},
}


def shapes_of(family: Family) -> list[str]:
    """The shapes that make a difference for a model."""
    if family.inputs == "audio":
        return ["padded", "one"]
    if family.encoder_decoder:
        return [name for name in SHAPES if name != "padded on the other side"]
    return list(SHAPES)


BEAM: dict[str, Any] = {"num_beams": 4}
BEAM_SAMPLE: dict[str, Any] = {"num_beams": 3, "do_sample": True}
SAMPLE: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}

# Options of the search itself, on top of beam search.
SEARCH: dict[str, dict[str, Any]] = {
    "length_penalty -1": {"length_penalty": -1.0},
    "length_penalty 0": {"length_penalty": 0.0},
    "length_penalty 2": {"length_penalty": 2.0},
    "early_stopping": {"early_stopping": True},
    "early_stopping never": {"early_stopping": "never"},
    "early_stopping never, length_penalty 2": {"early_stopping": "never", "length_penalty": 2.0},
    "num_return_sequences 4": {"num_return_sequences": 4},
    "as many beams as half the vocabulary": {"num_beams": VOCABULARY // 2 + 1, "max_new_tokens": 4},
    "num_beams 2": {"num_beams": 2},
}

# Options that change scores or decide when to stop: on top of beam search and of sampling.
CONTROL: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": LONG + 7, "max_new_tokens": None},
    "max_new_tokens 1": {"max_new_tokens": 1},
    "min_length": {"min_length": LONG + 9},
    "min_new_tokens": {"min_new_tokens": 10},
    "max_time": {"max_time": 1e6},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "both n-gram sizes": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "bad_words_ids": {"bad_words_ids": [[7], [12, 13], [50, 51, 52], [90]]},
    "sequence_bias": {"sequence_bias": [[[10], -8.0], [[20, 21], 6.0], [[30], 4.0]]},
    "forced_bos_token_id": {"forced_bos_token_id": 11},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "forced_eos_token_id, several": {"forced_eos_token_id": [EOS, 9]},
    "suppress_tokens": {"suppress_tokens": list(range(40, 90))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(10, 100))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.4)},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.3},
    "remove_invalid_values": {"remove_invalid_values": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "several eos tokens": {"eos_token_id": [EOS, 10, 20, 30, 40, 50]},
    "end at the first step": {"sequence_bias": [[[EOS], 1000.0]]},
    "dynamic cache": {"cache_implementation": "dynamic", "use_cache": True},
    "no eos token": {"eos_token_id": None, "pad_token_id": None},
    "many at once": {
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.2,
        "min_new_tokens": 4,
        "bad_words_ids": [[7]],
        "renormalize_logits": True,
    },
}

# Options of drawing, on top of sampling and of beam sampling.
DRAWING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k 0": {"top_k": 0},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.01},
    "all of them": {"temperature": 1.3, "top_k": 60, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
}
