"""Memory is taken by use: of a call that ends early, and of captured steps between two calls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastgen
from fastgen.decoding import host_memory
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence.captured import need_programs, record_programs
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


def test_idle_steps_take_no_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps for different numbers of rows, only the one that runs has K and V in memory. The next call finds them as
    new ones.
    """
    record_programs(device, monkeypatch)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=4096, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 60, (4, 1500))
    expected = {rows: 2 * 2 * rows * 1500 * 256 * 4 for rows in (1, 4)}  # bytes of the prefix
    for rows in (1, 4, 1, 4):
        call = model.generate(
            ids[:rows], attention_mask=torch.ones_like(ids[:rows]), do_sample=False, max_new_tokens=12
        )
        with fastgen.disabled():
            wanted = model.generate(ids[:rows], do_sample=False, max_new_tokens=12)
        assert torch.equal(call, wanted)  # whatever calls before have left
    steps = list(graph_cache._of(model).steps.values())
    assert [step.key.rows for step in steps] == [1, 4]
    assert steps[1].buffers.own[0].prefix[0].any()  # the next call may be like the last one
    graph_cache.take(model, steps[0].key, lambda: None)
    steps[0].clear()
    before = host_memory._resident()
    for step in steps:
        for kv in step.buffers.own:
            for part in kv.prefix:
                assert not part.any()  # reads zeros of the system, which are one page
                part.fill_(1)
    assert host_memory._resident() - before > sum(expected.values()) * 0.9
