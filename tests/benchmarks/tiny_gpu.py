"""The workloads for a GPU, and what makes one of them tiny enough for a CPU."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workload import Context
from benchmarks.workloads import all_workloads
from benchmarks.workloads.gpu_models import OnGpu, WeightBound

# The seconds that they have are those of a GPU; a CPU may take an hour.
WORKLOADS = {
    workload.name: replace(workload, seconds=workload.seconds and 3600.0)
    for workload in all_workloads()
    if workload.needs_gpu
}


GENERATION = [name for name, workload in WORKLOADS.items() if isinstance(workload, OnGpu)]


BART = {
    "vocab_size": 97,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}


CONFIGS = {
    "bart": BART,
    "prophetnet": {
        "vocab_size": 97,
        "hidden_size": 16,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2,
    },
    "t5": {
        "vocab_size": 97,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
    },
    "gpt2": {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "unilm": {
        "vocab_size": 97,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "mask_token_id": 3,
    },
    "llama": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip


ON_CPU = Context(threads=1)


def tiny(work: OnGpu, **changes) -> OnGpu:
    config = next(config for shape, config in CONFIGS.items() if work.shape.__name__.startswith(shape))
    sizes = {"batch": min(work.batch, 2), "length": min(work.length, 24), "new_tokens": 5, "repetitions": 1}
    if isinstance(work, WeightBound):
        changes["copy_bytes"] = 2**12
    return replace(work, **{"config": config, **sizes, **changes})
