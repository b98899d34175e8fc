"""Models that keep states besides K and V, or in their place: linear attention, short convolutions.

Weights are drawn as in the grid, but for those that say how fast a state is forgotten.
"""

from __future__ import annotations

from typing import Any

import transformers

from fastgen import releases
from tests.equivalence.models import HIDDEN, LLAMA, Family, Weights

_W = Weights(1)
_LAYERS = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **LLAMA,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}

_LATENT = {
    **HIDDEN, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "num_local_experts": 4,
}  # fmt: skip

_ALL = [
    Family("kimi-linear", "KimiLinearForCausalLM", _W, {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4}),
    Family("bailing-hybrid", "BailingHybridForCausalLM", _W, {**_LATENT, "head_dim": 8}),
    Family("qwen3.5", "Qwen3_5ForCausalLM", _W, {**_DELTA, **_LAYERS}),
    Family("lfm2", "Lfm2ForCausalLM", _W, {**HIDDEN, "num_key_value_heads": 2, "num_hidden_layers": 3,
                                           "layer_types": ["conv", "full_attention", "conv"]}),
    Family("granite-hybrid", "GraniteMoeHybridForCausalLM", _W, {
        **HIDDEN, **_MAMBA2, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_local_experts": 0,
        "shared_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    Family("granite-moe-hybrid", "GraniteMoeHybridForCausalLM", _W, {
        **HIDDEN, **_MAMBA2, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_local_experts": 4,
        "shared_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope"}),
    Family("falcon-h1", "FalconH1ForCausalLM", _W, {
        **LLAMA, **_MAMBA2, "mamba_d_ssm": 64}),
    Family("mamba2", "Mamba2ForCausalLM", _W, {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2,
        "chunk_size": 16}),
    Family("bamba", "BambaForCausalLM", _W, {
        **HIDDEN, **_MAMBA2, "num_key_value_heads": 2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    Family("qwen3-next", "Qwen3NextForCausalLM", _W, {**_DELTA, **_LAYERS, **_SHARED_EXPERT}),
    Family("qwen3.5-moe", "Qwen3_5MoeForCausalLM", _W, {**_DELTA, **_LAYERS, **_SHARED_EXPERT}),
    Family("lfm2-moe", "Lfm2MoeForCausalLM", _W, {
        **HIDDEN, **_EXPERTS, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"]}),
    Family("nemotron-h", "NemotronHForCausalLM", _W, {
        "hidden_size": 32, "intermediate_size": 64, "layers_block_type": ["linear_attention", "mlp", "full_attention",
        "linear_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 2, "chunk_size": 16}),
    Family("olmo-hybrid", "OlmoHybridForCausalLM", _W, {**HIDDEN, **_LAYERS, "num_hidden_layers": 4,
        "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8}),
    Family("mamba", "MambaForCausalLM", _W, {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
    Family("falcon-mamba", "FalconMambaForCausalLM", _W, {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
    Family("jamba", "JambaForCausalLM", _W, {
        **HIDDEN, "num_key_value_heads": 2, "use_mamba_kernels": False, "mamba_d_state": 4, "num_experts": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1}),
]  # fmt: skip
# Others have another cache in earlier releases.
_LATE = {"mamba", "mamba2", "falcon-mamba", "nemotron-h"}
HYBRIDS = [
    family
    for family in _ALL
    if hasattr(transformers, family.model_class)
    and releases.keeps_states_in_cache()
    and (family.name not in _LATE or releases.cache_name() == releases.CACHE_NAMES[0])
]
BY_NAME: dict[str, Any] = {family.name: family for family in HYBRIDS}
