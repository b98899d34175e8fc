"""Tiny models of FairSeq's, with random weights that make them generate sequences of many lengths."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import bart, fconv, lstm, transformer, transformer_lm
from fairseq.models.nat import levenshtein_transformer
from torch import Tensor

WORDS = 60


def dictionary(*more: str) -> Dictionary:
    """`<s> <pad> </s> <unk>` and some words."""
    made = Dictionary()
    for word in [*(f"w{i}" for i in range(WORDS)), *more]:
        made.add_symbol(word)
    return made


def task(*more: str) -> Any:
    words = dictionary(*more)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words)


def checkpoint(**parts: Any) -> dict[str, Any]:
    """What FairSeq writes to a file, with these parts of it."""
    history = {"criterion_name": "", "optimizer_name": "", "num_updates": 1, "lr_scheduler_state": {"best": None}}
    state = {"args": None, "cfg": None, "model": {}, "optimizer_history": [history], "last_optimizer_state": None}
    return {**state, "extra_state": {"train_iterator": {"epoch": 1}}, **parts}


def lively(model: Any, seed: int = 0, scale: float = 1.6) -> Any:
    """The model with weights as far from each other's as a trained one's, ready to generate.

    Positions count, so that it does not repeat itself, and `</s>` is in every state either likely or unlikely.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif parameter.dim() > 1:
                spread = scale / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
                if "embed_positions" in name:
                    parameter.mul_(5)
                if "output_projection" in name or "adaptive_softmax.head" in name or "embed_tokens" in name:
                    parameter[2:3].mul_(4)
    return model.eval()


def sizes(**options: Any) -> Namespace:
    """Of a tiny encoder-decoder; options are those of its architecture."""
    size: dict[str, Any] = {"dropout": 0.1, "max_source_positions": 128, "max_target_positions": 128}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_embed_dim": 32, f"{part}_ffn_embed_dim": 64, f"{part}_layers": 2}
        size[f"{part}_attention_heads"] = 4
    return Namespace(**size | options)


def encoder_decoder(seed: int = 0, scale: float = 1.6, **options: Any) -> Any:
    """The Transformer; options are those of its architecture."""
    args = sizes(**options)
    transformer.base_architecture(args)
    return lively(transformer.TransformerModel.build_model(args, task()), seed, scale)


def language_model_arguments(**options: Any) -> Namespace:
    args = Namespace(
        decoder_embed_dim=32, decoder_ffn_embed_dim=64, decoder_layers=2, decoder_attention_heads=4,
        max_target_positions=256, tokens_per_sample=256, **options,
    )  # fmt: skip
    transformer_lm.base_lm_architecture(args)
    return args


def language_model(seed: int = 0, scale: float = 1.6, words: Any = None, **options: Any) -> Any:
    args = language_model_arguments(**options)
    return lively(transformer_lm.TransformerLanguageModel.build_model(args, words or task()), seed, scale)


def gpt2(seed: int = 0) -> Any:
    return language_model(
        seed, activation_fn="gelu", decoder_normalize_before=True, decoder_learned_pos=True,
        share_decoder_input_output_embed=True,
    )  # fmt: skip


def bart_arguments(**options: Any) -> Namespace:
    args = sizes(**options)
    bart.bart_base_architecture(args)
    return args


def bart_model(seed: int = 0, words: Any = None, **options: Any) -> Any:
    return lively(bart.BARTModel.build_model(bart_arguments(**options), words or task("<mask>")), seed)


def mbart_model(seed: int = 0, words: Any = None) -> Any:
    # What `mbart_large` sets, but for its size.
    return bart_model(
        seed, words, no_scale_embedding=False, encoder_normalize_before=True, decoder_normalize_before=True,
        layernorm_embedding=True,
    )  # fmt: skip


def lstm_model(seed: int = 0) -> Any:
    args = Namespace(encoder_embed_dim=16, decoder_embed_dim=16, decoder_out_embed_dim=16, criterion="cross_entropy")
    lstm.base_architecture(args)
    return lively(lstm.LSTMModel.build_model(args, task()), seed)


def convolutional(seed: int = 0) -> Any:
    args = Namespace(
        encoder_embed_dim=16, decoder_embed_dim=16, encoder_layers="[(16, 3)]", decoder_layers="[(16, 3)]",
        decoder_out_embed_dim=16, max_source_positions=128, max_target_positions=128,
    )  # fmt: skip
    fconv.base_architecture(args)
    return lively(fconv.FConvModel.build_model(args, task()), seed)


def levenshtein(seed: int = 0) -> Any:
    args = sizes()
    levenshtein_transformer.levenshtein_base_architecture(args)
    return lively(levenshtein_transformer.LevenshteinTransformerModel.build_model(args, task()), seed)


# Sizes of every part: pre-norm and post-norm, shared and separate embeddings, learned and sinusoidal positions, ...
SEQ2SEQ: dict[str, Callable[..., Any]] = {
    "post-norm": encoder_decoder,
    "pre-norm": lambda seed=0: encoder_decoder(seed, encoder_normalize_before=True, decoder_normalize_before=True),
    "shared": lambda seed=0: encoder_decoder(seed, share_all_embeddings=True),
    "adaptive": lambda seed=0: encoder_decoder(seed, adaptive_softmax_cutoff="20,40"),
    "normformer": lambda seed=0: encoder_decoder(
        seed, scale_attn=True, scale_fc=True, scale_heads=True, decoder_normalize_before=True
    ),
    "layerdrop": lambda seed=0: encoder_decoder(seed, encoder_layerdrop=0.2, decoder_layerdrop=0.2),
    "bart": bart_model,
    "mbart": mbart_model,
}
LANGUAGE_MODELS: dict[str, Callable[..., Any]] = {
    "post-norm": language_model,
    "gpt2": gpt2,
    "adaptive": lambda seed=0: language_model(seed, adaptive_softmax_cutoff="20,40"),
    "adaptive inputs": lambda seed=0: language_model(
        seed,
        scale=0.8,  # with tied weights the scores are that much further apart
        adaptive_input=True,
        adaptive_input_cutoff="20,40",
        adaptive_input_factor=2,
        adaptive_softmax_cutoff="20,40",
        adaptive_softmax_factor=2,
        tie_adaptive_weights=True,
        tie_adaptive_proj=True,
        decoder_output_dim=32,
        decoder_input_dim=32,
    ),
    "layerdrop": lambda seed=0: language_model(seed, decoder_layerdrop=0.2),
}


def sources(batch: int = 4, length: int = 12, left_pad: bool = True, seed: int = 0) -> dict[str, Any]:
    """A batch as FairSeq's datasets make it: sources of different lengths, which end in `</s>`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 4 + WORDS, (batch, length), generator=generator)
    lengths = torch.tensor([length - 3 * i % (length - 2) for i in range(batch)])
    for row, count in enumerate(lengths.tolist()):
        tokens[row, count - 1] = 2
        tokens[row, count:] = 1
        if left_pad:
            tokens[row] = tokens[row].roll(length - count)
    return {"id": torch.arange(batch), "net_input": {"src_tokens": tokens, "src_lengths": lengths}}


def prefixes(batch: int = 3, length: int = 40, seed: int = 0) -> Tensor:
    """What language models continue. The first 50 words of each are different ones."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.cat([torch.randperm(50, generator=generator) for _ in range(length // 50 + 1)]) for _ in range(batch)]
    return torch.stack(rows)[:, :length] + 4
