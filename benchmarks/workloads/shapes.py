"""Models in the shapes of well-known ones, with random weights: speed does not depend on the weights' values.

Each function takes changes to the configuration, which tests use to make the model tiny.
"""

from __future__ import annotations

from typing import Any


def _bart(**config: Any) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    # BART forces the last token of an output at the maximum length; other toolkits generate it like any other.
    return BartForConditionalGeneration(BartConfig(**{"forced_eos_token_id": None, **config}))


def _layers(encoder: int, decoder: int, width: int, heads: int) -> dict[str, int]:
    """Returns sizes for the configurations of BART and Marian."""
    parts = {"encoder": encoder, "decoder": decoder}
    found = {f"{part}_layers": layers for part, layers in parts.items()}
    found |= {f"{part}_attention_heads": heads for part in parts}
    return found | {f"{part}_ffn_dim": 4 * width for part in parts} | {"d_model": width}


def bart_base(**changes: Any) -> Any:
    """BART-base: 6 + 6 layers of width 768, vocabulary of 50,265."""
    return _bart(**{"vocab_size": 50265, **_layers(6, 6, 768, 12), **changes})


def bart_large(**changes: Any) -> Any:
    """BART-large: 12 + 12 layers of width 1024, vocabulary of 50,264."""
    return _bart(**{"vocab_size": 50264, **_layers(12, 12, 1024, 16), **changes})


def bart_distilled(**changes: Any) -> Any:
    """DistilBART 12-6: BART-large with every second layer of the decoder."""
    return bart_large(**{"decoder_layers": 6, **changes})


def prophetnet_large(**changes: Any) -> Any:
    """ProphetNet-large: 12 + 12 layers of width 1024, predicting two tokens ahead, vocabulary of 30,522."""
    from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

    # The class's defaults have this size.
    return ProphetNetForConditionalGeneration(ProphetNetConfig(**changes))


def opus_mt(**changes: Any) -> Any:
    """The opus-mt translation models: 6 + 6 layers of width 512, vocabulary of 58,101."""
    from transformers import MarianConfig, MarianMTModel

    config: dict[str, Any] = {
        "vocab_size": 58101,
        **_layers(6, 6, 512, 8),
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
        **changes,
    }
    # The last token is the padding, from which the decoder starts.
    padding = config["vocab_size"] - 1
    tokens = {"pad_token_id": padding, "decoder_start_token_id": padding, "eos_token_id": 0, "bos_token_id": 0}
    return MarianMTModel(MarianConfig(forced_eos_token_id=None, **tokens, **config))


def t5_base(**changes: Any) -> Any:
    """T5-base: 12 + 12 layers of width 768, vocabulary of 32,128, relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
    return T5ForConditionalGeneration(T5Config(**{**sizes, "decoder_start_token_id": 0, **changes}))


def t5_small(**changes: Any) -> Any:
    """T5-small: 6 + 6 layers of width 512, vocabulary of 32,128."""
    small: dict[str, Any] = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8}
    return t5_base(**small | changes)


def gpt2(**changes: Any) -> Any:
    """GPT-2, 124 million parameters: 12 layers of width 768, vocabulary of 50,257."""
    from transformers import GPT2Config, GPT2LMHeadModel

    # The class's defaults have this size.
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=1, pad_token_id=1, **changes))


def _llama(vocabulary: int, width: int, inner: int, layers: int, heads: tuple[int, int], **config: Any) -> Any:
    """`heads` are the numbers of query heads and K/V heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, **config}))


def llama_1b(**changes: Any) -> Any:
    """Llama 3.2 1B: 16 layers of width 2048, grouped queries (32 heads, 8 for K/V), vocabulary of 128,256, tied."""
    return _llama(128256, 2048, 8192, 16, (32, 8), **{"tie_word_embeddings": True, **changes})


def llama_7b(**changes: Any) -> Any:
    """Llama 2 7B: 32 layers of width 4096, 32 heads, vocabulary of 32,000, not tied."""
    return _llama(32000, 4096, 11008, 32, (32, 32), **{"tie_word_embeddings": False, **changes})


def llama_small(**changes: Any) -> Any:
    """A small Llama with grouped queries: 8 layers of width 768, 12 heads, 4 for K/V, vocabulary of 32,000."""
    return _llama(32000, 768, 2048, 8, (12, 4), **{"tie_word_embeddings": True, **changes})


def unilm_base(**changes: Any) -> Any:
    """UniLM v1, base: 12 layers of width 768, vocabulary of 28,996."""
    from fastgen.models.unilm import UniLMConfig, UniLMForSeq2SeqLM

    return UniLMForSeq2SeqLM(UniLMConfig(**changes))
