"""The configuration of UniLM."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig


class UniLMConfig(PreTrainedConfig):
    """Shape and special tokens of a UniLM. The defaults are those of UniLM v1, base, cased.

    The names are BERT's, whose shape and vocabulary UniLM has.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, hidden_act: as in BERT.
        max_position_embeddings: positions that a source and its target have together.
        type_vocab_size: segments that have an embedding.
        source_type_id, target_type_id: the segments of source and target. UniLM v1 has 4 and 5; what s2s-ft has
            fine-tuned, 0 and 1 unless its configuration says otherwise.
        layer_norm_eps: added to the variance. The authors' decoders use this default whatever a published
            configuration says.
        pad_token_id, bos_token_id, eos_token_id, mask_token_id: [PAD], [CLS], [SEP] and [MASK] of BERT's English
            vocabularies.
        decoder_start_token_id: what the tokens that `generate` returns begin with. The model never reads it: a target
            has no token before its first.
    """

    model_type = "unilm"
    # The target takes positions behind those of the source: what is generated is missing there.
    target_follows_source: ClassVar[bool] = True

    vocab_size: int = 28996
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 6
    source_type_id: int = 4
    target_type_id: int = 5
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    bos_token_id: int | None = 101
    eos_token_id: int | list[int] | None = 102
    mask_token_id: int = 103
    decoder_start_token_id: int | None = 0
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    use_cache: bool = True

    @classmethod
    def large(cls, **changes: Any) -> UniLMConfig:
        """The shape of UniLM v1, large: 24 layers of width 1024."""
        shape: dict[str, Any] = {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        }
        return cls(**shape | changes)
