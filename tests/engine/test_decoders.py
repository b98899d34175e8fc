"""Decoders that are known to ignore padding: requests share prefills and steps, and each has its own tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fastgen
from fastgen.decoding import unpadding
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.optimizer.transformers import buckets
from tests.engine.conftest import WAIT, run
from tests.equivalence.models import BOS, EOS, FIRST_WORD, PAD, VOCABULARY, Weights, enliven, padded

# What configurations call their sizes, those of a tiny model.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), 256),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "q_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **dict.fromkeys(("head_dim", "rotary_dim", "hidden_size_per_layer_input", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "num_key_value_heads": 2,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_kv_shared_layers": 0,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
# What some models compute of others, or do without, where a configuration has none.
OF_OTHERS = {"head_dim", "num_key_value_heads", "num_experts_per_tok"}
# Of each layer, where a configuration says it.
OF_LAYERS = ("layer_types", "mlp_layer_types")
# These are built, and run, by other tests; or read pictures around a decoder that is here.
ELSEWHERE = {"gemma4", "gemma2", "gpt_oss", "idefics3", "internvl", "llava", "mistral3", "smolvlm"}
ELSEWHERE |= {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision"}
NAMES = sorted({name.split(".")[2] for name in buckets.DECODERS} - ELSEWHERE)
LENGTHS = {20: 12, 7: 9, 13: 14, 1: 10}  # tokens of each prompt, and the most that it gets


@functools.cache
def build(name: str) -> Any:
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    kind = getattr(module, next(each for each in module.__all__ if each.endswith(("ForCausalLM", "LMHeadModel"))))
    usual = vars(kind.config_class())
    known = {key for key, value in usual.items() if value is not None} | (OF_OTHERS & usual.keys())
    given: dict[str, Any] = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:  # each head has K and V of its own
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    for key in OF_LAYERS:
        if isinstance(of_each := usual.get(key), list):
            given[key] = [of_each[0], of_each[-1]]
    torch.manual_seed(0)
    model = kind(kind.config_class(**given)).eval()
    enliven(model, Weights(1))
    model.generation_config.update(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    return model


@pytest.mark.sampled(16)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", NAMES)
def test_requests_share_prefills_and_steps(name: str, options: dict[str, Any]) -> None:
    model, generator = build(name), torch.Generator().manual_seed(5)
    prompts = [torch.randint(FIRST_WORD, VOCABULARY, (1, length), generator=generator) for length in LENGTHS]

    def together() -> list[Any]:
        with fastgen.Engine(model, slots=12) as engine:
            each = zip(prompts, LENGTHS.values(), strict=True)
            waiting = [engine.submit(ids, max_new_tokens=most, **options) for ids, most in each]
            made = [request.result(WAIT) for request in waiting]
            stats = engine.stats()
        assert stats["steps"] and stats["batches"] < len(prompts) and not stats["alone"], stats
        return made

    def alone() -> list[Any]:
        each = zip(prompts, LENGTHS.values(), strict=True)
        return [model.generate(ids, max_new_tokens=most, **options) for ids, most in each]

    with fastgen.disabled():
        expected = alone()
    for want, found in zip(expected, together(), strict=True):
        assert torch.equal(want, found), (name, options)


# XGLM makes its table of positions anew for a longer prompt: what runs begins again.
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "xglm"])
def test_beginnings_are_shared_and_long_prompts_read_in_chunks(name: str) -> None:
    """Behind what the cache holds, a pass gives what it gives behind a prompt that is read at once."""
    model, generator = build(name), torch.Generator().manual_seed(5)
    words = torch.randint(FIRST_WORD, VOCABULARY, (4, 150), generator=generator)
    words[2:, :90] = words[1, :90]
    lengths, counts = (9, 150, 130, 101), (16, 6, 8, 7)
    inputs = [ids[None, :length] for ids, length in zip(words, lengths, strict=True)]
    options = [{"max_new_tokens": count, "min_new_tokens": count} for count in counts]
    requests = [
        make(model, {"input_ids": ids}, None, given, None, 4) for ids, given in zip(inputs, options, strict=True)
    ]
    executor = ContinuousBatches(model, 4, max_stall=1e-4)
    run(executor, requests)
    stats = executor.stats()
    assert stats["shared_positions"] and stats["chunks"] and not stats["alone"], stats
    with fastgen.disabled():
        expected = [model.generate(ids, **given) for ids, given in zip(inputs, options, strict=True)]
    assert all(torch.equal(request.future.result(0), each) for request, each in zip(requests, expected, strict=True))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_a_batch_run_in_groups(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about one length, without the padding in front."""
    monkeypatch.setattr(unpadding, "BUCKET_COST", 4)
    model, inputs = build(name), padded([96, 7, 90, 13, 1], side="left")
    groups = unpadding.by_mask(inputs["attention_mask"], in_front=True)
    assert len(groups) > 1
    with fastgen.disabled():
        expected = model.generate(**inputs, max_new_tokens=10, **options)
    assert torch.equal(model.generate(**inputs, max_new_tokens=10, **options), expected)
