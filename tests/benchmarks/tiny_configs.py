"""Configurations as small as they come, by the beginning of the name of the shape that they stand for."""

from __future__ import annotations

# Marian has the fields of BART.
_BART = dict(
    vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32,
)  # fmt: skip

CONFIGS: dict[str, dict[str, int]] = {
    "bart": _BART,
    "opus": _BART,
    "prophetnet": dict(
        vocab_size=97, hidden_size=16, encoder_ffn_dim=32, decoder_ffn_dim=32, num_encoder_layers=2,
        num_decoder_layers=2, num_encoder_attention_heads=2, num_decoder_attention_heads=2,
    ),
    "t5": dict(vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2),
    "gpt2": dict(vocab_size=97, n_embd=16, n_layer=2, n_head=2),
    "unilm": dict(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        mask_token_id=3,
    ),
    "llama": dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ),
}  # fmt: skip
