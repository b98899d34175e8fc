"""Tiny models of several families, with random weights: what runs them on samples of random tokens."""

from __future__ import annotations

import torch

WORDS = 40


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return made(LlamaForCausalLM, LlamaConfig(**(shape | changes)))


def gpt2(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return made(GPT2LMHeadModel, GPT2Config(**(shape | changes)))


def gemma3():
    """Its blocks are given different masks and positions."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=4, sliding_window_pattern=2, max_position_embeddings=64,
    )  # fmt: skip
    return made(Gemma3ForCausalLM, config)


# Marian has the fields of BART.
_BART = dict(
    vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.3,
)  # fmt: skip


def bart(**changes):
    from transformers import BartConfig, BartForConditionalGeneration

    return made(BartForConditionalGeneration, BartConfig(**(_BART | changes)))


def marian():
    from transformers import MarianConfig, MarianMTModel

    tokens = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=1, decoder_vocab_size=WORDS)
    return made(MarianMTModel, MarianConfig(**(_BART | tokens)))


def t5(**changes):
    """The first block of a stack makes the position bias of all others."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = dict(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
        decoder_start_token_id=1, pad_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return made(T5ForConditionalGeneration, T5Config(**(shape | changes)))


def made(kind, config):
    torch.manual_seed(0)
    return kind(config).eval()


FAMILIES = {"llama": llama, "gemma3": gemma3, "bart": bart, "marian": marian, "t5": t5}


def samples(model, count=4, seed=1):
    """Samples of different lengths, each of them one sequence or one pair."""
    source = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(3, WORDS, (1, length), generator=source)

    made = [{"input_ids": tokens(5 + 3 * number)} for number in range(count)]
    if model.config.is_encoder_decoder:
        made = [sample | {"labels": tokens(4 + number)} for number, sample in enumerate(made)]
    return made


def runner(model, given):
    return lambda number: model(**given[number], use_cache=False)
