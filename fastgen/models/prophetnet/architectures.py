"""The shapes that ProphetNet's authors have given names to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SMALL = {
    "ngram": 2,
    "num_buckets": 32,
    "relative_max_distance": 128,
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_embed_dim": 512,
    "decoder_ffn_embed_dim": 2048,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "share_decoder_input_output_embed": False,
    "share_all_embeddings": False,
    "load_from_pretrained_model": None,
    "load_sep": False,
    "max_source_positions": 512,
    "max_target_positions": 512,
}
_BASE = _SMALL | {
    "activation_fn": "gelu",
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_attention_heads": 12,
    "decoder_embed_dim": 768,
    "decoder_ffn_embed_dim": 3072,
    "decoder_attention_heads": 12,
    "share_decoder_input_output_embed": True,
    "share_all_embeddings": True,
}
_MIDDLE = _BASE | {
    "encoder_embed_dim": 1024,
    "encoder_ffn_embed_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_embed_dim": 1024,
    "decoder_ffn_embed_dim": 4096,
    "decoder_attention_heads": 16,
}
_LARGE = _MIDDLE | {"encoder_layers": 12, "decoder_layers": 12}


def _setter(defaults: dict[str, Any]) -> Callable[[Any], None]:
    def set_defaults(args: Any) -> None:
        for name, value in defaults.items():
            setattr(args, name, getattr(args, name, value))

    return set_defaults


ARCHITECTURES: dict[str, Callable[[Any], None]] = {
    "ngram_transformer_prophet": _setter(_SMALL),
    "ngram_transformer_prophet_base": _setter(_BASE),
    "ngram_transformer_prophet_middle": _setter(_MIDDLE),
    "ngram_transformer_prophet_large": _setter(_LARGE),
}
"""{name: sets what `args` lacks}. The published checkpoints are of the large one."""
