"""Models by the shape of well-known ones, with random weights: how fast they run does not depend on what they know.

Each function takes changes to the configuration, which tests use to make the model tiny.
"""

from __future__ import annotations

from typing import Any


def bart_base(**changes: Any) -> Any:
    """BART-base: 6 + 6 layers of width 768, vocabulary of 50,265."""
    from transformers import BartConfig, BartForConditionalGeneration

    config: dict[str, Any] = {
        "vocab_size": 50265,
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "max_position_embeddings": 1024,
        # BART forces the last token of an output that is long enough; other toolkits generate it like any other.
        "forced_eos_token_id": None,
    }
    return BartForConditionalGeneration(BartConfig(**config | changes))


def bart_large(**changes: Any) -> Any:
    """BART-large: 12 + 12 layers of width 1024, vocabulary of 50,264."""
    large: dict[str, Any] = {
        "vocab_size": 50264,
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
    }
    return bart_base(**large | changes)


def bart_distilled(**changes: Any) -> Any:
    """DistilBART 12-6: BART-large with every second layer of the decoder."""
    return bart_large(**{"decoder_layers": 6} | changes)


def prophetnet_large(**changes: Any) -> Any:
    """ProphetNet-large: 12 + 12 layers of width 1024, predicting two tokens ahead, vocabulary of 30,522."""
    from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

    # What the class has for defaults is this size.
    return ProphetNetForConditionalGeneration(ProphetNetConfig(**changes))


def opus_mt(**changes: Any) -> Any:
    """The opus-mt translation models: 6 + 6 layers of width 512, vocabulary of 58,101."""
    from transformers import MarianConfig, MarianMTModel

    config: dict[str, Any] = {
        "vocab_size": 58101,
        "d_model": 512,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
    }
    config |= changes
    # The last token is the padding, which the decoder starts from.
    padding = config["vocab_size"] - 1
    tokens = {"pad_token_id": padding, "decoder_start_token_id": padding, "eos_token_id": 0, "bos_token_id": 0}
    return MarianMTModel(MarianConfig(forced_eos_token_id=None, **tokens, **config))


def t5_base(**changes: Any) -> Any:
    """T5-base: 12 + 12 layers of width 768, vocabulary of 32,128, relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config: dict[str, Any] = {
        "vocab_size": 32128,
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**config | changes))


def t5_small(**changes: Any) -> Any:
    """T5-small: 6 + 6 layers of width 512, vocabulary of 32,128."""
    small: dict[str, Any] = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8}
    return t5_base(**small | changes)


def gpt2(**changes: Any) -> Any:
    """GPT-2, 124 million parameters: 12 layers of width 768, vocabulary of 50,257."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config: dict[str, Any] = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    config |= changes
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=1, pad_token_id=1, **config))


def llama_1b(**changes: Any) -> Any:
    """Llama 3.2 1B: 16 layers of width 2048, grouped queries (32 heads, 8 for K/V), vocabulary of 128,256, tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**config | changes))


def llama_7b(**changes: Any) -> Any:
    """Llama 2 7B: 32 layers of width 4096, 32 heads, vocabulary of 32,000, not tied."""
    large: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    }
    return llama_1b(**large | changes)


def llama_small(**changes: Any) -> Any:
    """A small Llama with grouped queries: 8 layers of width 768, 12 heads, 4 for K/V, vocabulary of 32,000."""
    small: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    return llama_1b(**small | changes)


def unilm_base(**changes: Any) -> Any:
    """UniLM v1, base: 12 layers of width 768, vocabulary of 28,996."""
    from fastgen.models.unilm import UniLMConfig, UniLMForSeq2SeqLM

    return UniLMForSeq2SeqLM(UniLMConfig(**changes))
