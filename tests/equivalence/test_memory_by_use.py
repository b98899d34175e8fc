"""A call that may generate any number of tokens, and ends early, takes the memory of those that it generates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence.captured import need_programs
from tests.equivalence.models import BY_NAME

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Bytes above what the process has before the call.
MOST = 100 * 2**20
ANY_NUMBER = 10**9
ALWAYS, NEVER = {"captured_step": "always"}, {"captured_step": "never"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "greedy, hooks": ("llama", NEVER, {}),
    "greedy, captured": ("llama", ALWAYS, {}),
    "beams, captured": ("llama", ALWAYS, {"num_beams": 3, "early_stopping": True}),
    "sampling, captured": ("llama", ALWAYS, {"do_sample": True}),
    "scores, captured": ("llama", ALWAYS, {"output_scores": True, "return_dict_in_generate": True}),
    "n-grams, captured": ("llama", ALWAYS, {"no_repeat_ngram_size": ANY_NUMBER}),
    "an encoder, captured": ("bart", ALWAYS, {}),
    "prompt lookup": ("llama", ALWAYS, {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": ANY_NUMBER}),
    "drafts of any length": ("llama", ALWAYS, {"prompt_lookup_num_tokens": ANY_NUMBER}),
    "self-draft": ("llama", {**ALWAYS, "self_speculation": "int8"}, {}),
    "an assistant": ("llama", ALWAYS, {"assistant_model": None}),
}


def _bytes(name: str) -> int:
    return 1024 * int(next(line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(name)))


@pytest.mark.skipif(not RESET.exists(), reason="only Linux says what a process has had at most")
@pytest.mark.parametrize("case", CASES)
def test_memory_is_taken_by_use(case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    need_programs(device, monkeypatch)
    name, settings, options = CASES[case]
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(1)
    options = {"do_sample": False, "num_beams": 1, **options}
    if "assistant_model" in options:
        options["assistant_model"] = copy.deepcopy(model)
    options["eos_token_id"] = list(range(2, 60))  # one of them comes soon
    if model.config.is_encoder_decoder:
        options["forced_eos_token_id"] = None
    fastgen.enable(**settings)
    graph_cache.drop_all()
    model.generate(**inputs, **options, max_new_tokens=4)
    try:
        RESET.write_text("5")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    before = _bytes("VmRSS")
    fastgen.reset_stats()
    result = model.generate(**inputs, **options, max_new_tokens=ANY_NUMBER)
    assert _bytes("VmHWM") - before < MOST
    assert fastgen.stats()["transformers.generate"]["accelerated"] == 1, fastgen.stats()
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    if not options["do_sample"] and options["num_beams"] == 1:  # for beams the library takes memory for all of them
        plain = {key: value for key, value in options.items() if key not in ("assistant_model",)}
        plain = {key: value for key, value in plain.items() if not key.startswith(("prompt_lookup", "max_matching"))}
        with fastgen.disabled():
            expected = model.generate(**inputs, **plain, max_new_tokens=200)
        expected = expected if isinstance(expected, torch.Tensor) else expected.sequences
        assert torch.equal(sequences, expected)
