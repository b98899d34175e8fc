"""Models outside the list of those that must be accelerated: the result is the same whatever FastGen does with them."""

from __future__ import annotations

from typing import Any

import transformers

from tests.equivalence.models import BART, FAMILIES, GPT2, HIDDEN, LLAMA, PAD, VOCABULARY, Family, Weights

_SEQ2SEQ = {name: value for name, value in BART.items() if name != "forced_eos_token_id"}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
_DEEPSEEK = {
    **HIDDEN, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_W = Weights(3, gain=2.0)


def _seq2seq(name: str, prefix: str, config: dict[str, Any]) -> Family:
    return Family(name, f"{prefix}ForConditionalGeneration", _W, config, encoder_decoder=True)


def _decoder(name: str, prefix: str, config: dict[str, Any]) -> Family:
    return Family(name, f"{prefix}ForCausalLM", _W, config)


OTHERS = [
    _seq2seq("longt5", "LongT5", {**_T5, "local_radius": 8}),
    _seq2seq("switch", "SwitchTransformers", {**_T5, "num_decoder_layers": 2, "num_experts": 2,
             "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}),
    _seq2seq("plbart", "PLBart", _SEQ2SEQ),
    _seq2seq("pegasus-x", "PegasusX", {**_SEQ2SEQ, "block_size": 8}),
    _seq2seq("mvp", "Mvp", _SEQ2SEQ),
    _seq2seq("fsmt", "FSMT", {**_SEQ2SEQ, "src_vocab_size": 160, "tgt_vocab_size": 160, "langs": ["en", "de"]}),
    _decoder("gptj", "GPTJ", {**GPT2, "rotary_dim": 4}),
    _decoder("codegen", "CodeGen", {**GPT2, "rotary_dim": 4}),
    _decoder("gpt-bigcode", "GPTBigCode", GPT2),
    _decoder("gpt-neo", "GPTNeo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 16,
             "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 512}),
    _decoder("falcon", "Falcon", {**HIDDEN, "multi_query": True}),
    _decoder("falcon-alibi", "Falcon", {**HIDDEN, "alibi": True, "multi_query": False}),
    _decoder("mpt", "Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "use_cache": True}),
    _decoder("xglm", "XGLM", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    _decoder("biogpt", "BioGpt", HIDDEN),
    Family("ctrl", "CTRLLMHeadModel", _W, {"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    Family("xlnet", "XLNetLMHeadModel", _W, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    Family("bert", "BertLMHeadModel", _W, {**HIDDEN, "is_decoder": True}),
    Family("openai-gpt", "OpenAIGPTLMHeadModel", _W, GPT2),
    _decoder("gemma3", "Gemma3", {**LLAMA, "sliding_window": 40, "query_pre_attn_scalar": 8}),
    _decoder("phi3", "Phi3", {**HIDDEN, "num_key_value_heads": 2}),
    _decoder("olmo2", "Olmo2", HIDDEN),
    _decoder("cohere", "Cohere", LLAMA),
    _decoder("stablelm", "StableLm", {**HIDDEN, "num_key_value_heads": 2}),
    _decoder("starcoder2", "Starcoder2", {**HIDDEN, "num_key_value_heads": 2, "sliding_window": 40}),
    _decoder("granite", "Granite", LLAMA),
    _decoder("qwen2-moe", "Qwen2Moe", {**LLAMA, "num_experts": 4, "moe_intermediate_size": 16}),
    _decoder("deepseek-v3", "DeepseekV3", _DEEPSEEK),
    _decoder("llama4", "Llama4", {**LLAMA, "attention_chunk_size": 16, "num_local_experts": 2}),
    _decoder("doge", "Doge", {**LLAMA, "keep_window_size": 8}),
    _decoder("rwkv", "Rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    _decoder("recurrent-gemma", "RecurrentGemma", {**HIDDEN, "lru_width": 32, "num_hidden_layers": 3,
             "attention_window_size": 16, "num_key_value_heads": 1}),
]  # fmt: skip
_MLA = {key: value for key, value in _DEEPSEEK.items() if key not in ("n_group", "topk_group")}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "partial_rotary_factor": 1 / 3, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_INDEXER = {"index_topk": 12, "index_n_heads": 2, "index_head_dim": 8}
# The second layer reads what the indexer of the first one has chosen.
_SHARED_INDEXER = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {**LLAMA, "vocab_size": VOCABULARY, "sliding_window": 400, "query_pre_attn_scalar": 8}
_DECODES = {"is_decoder": True, "num_hidden_layers": 3}
_LATER = [
    _decoder("deepseek-v2", "DeepseekV2", {**_MLA, "v_head_dim": 6, "first_k_dense_replace": 1}),
    _decoder("glm4-moe-lite", "Glm4MoeLite", {**_DEEPSEEK, "v_head_dim": 12, "mlp_layer_types": ["dense", "sparse"]}),
    _decoder("minicpm3", "MiniCPM3", {**_MLA, "q_lora_rank": 12}),
    _decoder("longcat-flash", "LongcatFlash", {**_MLA, "num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_size": 16,
             "zero_expert_num": 2, "moe_topk": 2, "head_dim": 4}),
    _decoder("youtu", "Youtu", {**_MLA, "q_lora_rank": None}),
    _decoder("fuyu", "Fuyu", {**HIDDEN, "text_config": {**HIDDEN, "vocab_size": VOCABULARY}, "patch_size": 4}),
    *(_decoder(prefix.lower(), prefix, {**HIDDEN, **_DECODES}) for prefix in (
        "Data2VecText", "Ernie", "MegatronBert", "RobertaPreLayerNorm", "XLMRobertaXL")),
    _decoder("aria", "AriaText", {**LLAMA, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    _decoder("mistral4", "Mistral4", {**_DEEPSEEK, "rope_parameters": _YARN}),
    _decoder("deepseek-v32", "DeepseekV32", {**_DEEPSEEK, **_INDEXER}),
    _decoder("glm-moe-dsa", "GlmMoeDsa", {**_DEEPSEEK, **_INDEXER, **_SHARED_INDEXER}),
    _decoder("axk2", "AXK2", {**_DEEPSEEK, **_INDEXER}),
    _decoder("hy-v4", "HYV4", {**_DEEPSEEK, **_INDEXER, **_SHARED_INDEXER}),
    _seq2seq("switch-experts", "SwitchTransformers", {**_T5, "num_decoder_layers": 2, "num_experts": 4,
             "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
    _seq2seq("nllb-moe", "NllbMoe", {**_SEQ2SEQ, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}),
    _decoder("jetmoe", "JetMoe", {**_EXPERTS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_key_value_heads": 2, "kv_channels": 8}),
    _decoder("diffllama", "DiffLlama", {**LLAMA, "num_key_value_heads": 4, "num_attention_heads": 8}),
    _seq2seq("t5gemma", "T5Gemma", {"encoder": _GEMMA, "decoder": {**_GEMMA, "cross_attention_hidden_size": 32}}),
]  # fmt: skip
# Not in every tested release, or not of interest in each: models with multi-head latent attention, relatives of BERT.
LATER = [family for family in _LATER if hasattr(transformers, family.model_class)]
KNOWN = {family.name: family for family in (*FAMILIES, *OTHERS, *LATER)}


def made(name: str, *args: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    """A model, which all tests share, and inputs for it: see `Family.make_inputs`."""
    return KNOWN[name].build(), KNOWN[name].make_inputs(*args, **inputs)
