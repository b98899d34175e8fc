"""Models outside the list of those that must be accelerated: the result is the same whatever FastGen does with them."""

from __future__ import annotations

from typing import Any

from tests.equivalence.models import BART, FAMILIES, GPT2, HIDDEN, LLAMA, PAD, Family, Weights

_SEQ2SEQ = {name: value for name, value in BART.items() if name != "forced_eos_token_id"}
_W = Weights(3, gain=2.0)

OTHERS = [
    Family(
        "longt5",
        "LongT5ForConditionalGeneration",
        _W,
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "local_radius": 8,
            "decoder_start_token_id": PAD,
        },
        encoder_decoder=True,
    ),
    Family(
        "switch",
        "SwitchTransformersForConditionalGeneration",
        _W,
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_experts": 2,
            "num_sparse_encoder_layers": 0,
            "num_sparse_decoder_layers": 0,
            "decoder_start_token_id": PAD,
        },
        encoder_decoder=True,
    ),
    Family("plbart", "PLBartForConditionalGeneration", _W, _SEQ2SEQ, encoder_decoder=True),
    Family("pegasus-x", "PegasusXForConditionalGeneration", _W, {**_SEQ2SEQ, "block_size": 8}, encoder_decoder=True),
    Family("mvp", "MvpForConditionalGeneration", _W, _SEQ2SEQ, encoder_decoder=True),
    Family(
        "fsmt",
        "FSMTForConditionalGeneration",
        _W,
        {**_SEQ2SEQ, "src_vocab_size": 160, "tgt_vocab_size": 160, "langs": ["en", "de"]},
        encoder_decoder=True,
    ),
    Family("gptj", "GPTJForCausalLM", _W, {**GPT2, "rotary_dim": 4}),
    Family("codegen", "CodeGenForCausalLM", _W, {**GPT2, "rotary_dim": 4}),
    Family("gpt-bigcode", "GPTBigCodeForCausalLM", _W, GPT2),
    Family(
        "gpt-neo",
        "GPTNeoForCausalLM",
        _W,
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
            "max_position_embeddings": 512,
        },
    ),
    Family("falcon", "FalconForCausalLM", _W, {**HIDDEN, "multi_query": True}),
    Family("falcon-alibi", "FalconForCausalLM", _W, {**HIDDEN, "alibi": True, "multi_query": False}),
    Family("mpt", "MptForCausalLM", _W, {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    Family("xglm", "XGLMForCausalLM", _W, {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    Family("biogpt", "BioGptForCausalLM", _W, HIDDEN),
    Family("ctrl", "CTRLLMHeadModel", _W, {"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    Family("xlnet", "XLNetLMHeadModel", _W, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    Family("bert", "BertLMHeadModel", _W, {**HIDDEN, "is_decoder": True}),
    Family("openai-gpt", "OpenAIGPTLMHeadModel", _W, GPT2),
    Family("gemma3", "Gemma3ForCausalLM", _W, {**LLAMA, "sliding_window": 40, "query_pre_attn_scalar": 8}),
    Family("phi3", "Phi3ForCausalLM", _W, {**HIDDEN, "num_key_value_heads": 2}),
    Family("olmo2", "Olmo2ForCausalLM", _W, HIDDEN),
    Family("cohere", "CohereForCausalLM", _W, LLAMA),
    Family("stablelm", "StableLmForCausalLM", _W, {**HIDDEN, "num_key_value_heads": 2}),
    Family("starcoder2", "Starcoder2ForCausalLM", _W, {**HIDDEN, "num_key_value_heads": 2, "sliding_window": 40}),
    Family("granite", "GraniteForCausalLM", _W, LLAMA),
    Family("qwen2-moe", "Qwen2MoeForCausalLM", _W, {**LLAMA, "num_experts": 4, "moe_intermediate_size": 16}),
    Family(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        _W,
        {
            **HIDDEN,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    Family("llama4", "Llama4ForCausalLM", _W, {**LLAMA, "attention_chunk_size": 16, "num_local_experts": 2}),
    Family("doge", "DogeForCausalLM", _W, {**LLAMA, "keep_window_size": 8}),
    Family("rwkv", "RwkvForCausalLM", _W, {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    Family(
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        _W,
        {**HIDDEN, "lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 16, "num_key_value_heads": 1},
    ),
]
KNOWN = {family.name: family for family in (*FAMILIES, *OTHERS)}


def made(name: str, *args: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    """A model, which all tests share, and inputs for it: see `Family.make_inputs`."""
    return KNOWN[name].build(), KNOWN[name].make_inputs(*args, **inputs)
