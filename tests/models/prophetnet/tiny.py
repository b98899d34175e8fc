"""A tiny ProphetNet of FairSeq's kind, its variants, and batches for it."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastgen.models.prophetnet.model import ARCHITECTURES, ProphetNetModel
from fastgen.models.prophetnet.task import BertDictionary
from tests.fairseq.models import lively

PAD, CLS, SEP, UNK, WORDS = 0, 1, 2, 3, 60
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
TOKENS = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]


def dictionary(*more: str) -> BertDictionary:
    return BertDictionary((token, 1) for token in [*TOKENS, *more])


def arguments(**changes: Any) -> Namespace:
    """Of a tiny model whose distances reach into the last bucket."""
    size: dict[str, Any] = {"num_buckets": 8, "relative_max_distance": 16, "dropout": 0.1}
    size |= {"max_source_positions": 128, "max_target_positions": 128}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_embed_dim": 32, f"{part}_ffn_embed_dim": 48, f"{part}_layers": 2}
        size[f"{part}_attention_heads"] = 4
    args = Namespace(**size | changes)
    ARCHITECTURES["ngram_transformer_prophet_base"](args)
    return args


def task(words: BertDictionary | None = None) -> Any:
    words = dictionary() if words is None else words
    return SimpleNamespace(source_dictionary=words, target_dictionary=words)


def model_of(args: Namespace, seed: int = 0) -> Any:
    return lively(ProphetNetModel.build_model(args, task()), seed)


def sources(batch: int = 4, length: int = 12, left_pad: bool = True, seed: int = 0) -> dict[str, Any]:
    """A batch as FairSeq's data sets make it: sources of different lengths, which end in [SEP]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 4 + WORDS, (batch, length), generator=generator)
    lengths = torch.tensor([length - 3 * i % (length - 2) for i in range(batch)])
    for row, count in enumerate(lengths.tolist()):
        tokens[row, count - 1], tokens[row, count:] = SEP, PAD
        if left_pad:
            tokens[row] = tokens[row].roll(length - count)
    return {"id": torch.arange(batch), "net_input": {"src_tokens": tokens, "src_lengths": lengths}}


def rows(tokens: Tensor) -> list[list[int]]:
    """Each row without its padding."""
    return [row[row != PAD].tolist() for row in tokens]


VARIANTS: dict[str, dict[str, Any]] = {
    "two streams": {},
    "three streams": {"ngram": 3},
    "one stream": {"ngram": 1},
    "own embeddings": {
        "share_all_embeddings": False, "share_decoder_input_output_embed": False, "activation_fn": "relu",
    },
    "deeper encoder": {
        "encoder_layers": 3, "encoder_embed_dim": 24, "share_all_embeddings": False, "num_buckets": 32,
        "relative_max_distance": 128,
    },
}  # fmt: skip
