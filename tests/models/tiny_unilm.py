"""A tiny UniLM for tests, and what it must compute, spelled out for one sequence and over all of its positions.

Nothing here is taken from the model but its weights, by their published names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastgen.models.unilm import UniLMConfig, UniLMForSeq2SeqLM

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCABULARY = 60

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
    "mask_token_id": MASK,
}


# How far the random weights of a kind are spread, by a part of the name: the first that fits.
_SPREADS = {"bias": 0.1, "LayerNorm": 0.3, "position": 2.0, "embeddings": 0.3, "query": 0.5, "key": 0.5, "": 0.4}


def tiny_model(seed: int = 1, end: float = 0.0, **changes: Any) -> UniLMForSeq2SeqLM:
    """A model with random weights, spread so that what it says depends on all of what it has read.

    Args:
        end: is added to the score of [SEP].
    """
    torch.manual_seed(seed)
    model = UniLMForSeq2SeqLM(UniLMConfig(**SHAPE | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = next(spread for part, spread in _SPREADS.items() if part in name)
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, spread)
        model.cls["predictions"].bias[SEP] += end
        # What cannot be part of a target.
        model.cls["predictions"].bias[[PAD, CLS, MASK]] -= 30.0
    return model


def sources(*lengths: int, seed: int = 0) -> list[list[int]]:
    """One source of each length: [CLS], words, [SEP]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [CLS, *torch.randint(4, VOCABULARY, (length - 2,), generator=generator).tolist(), SEP] for length in lengths
    ]


def batch(rows: list[list[int]], side: str = "right") -> dict[str, Tensor]:
    """The sources as `generate` takes them, padded on one side."""
    longest = max(map(len, rows))
    ids, masks = [], []
    for row in rows:
        padding, ones = [PAD] * (longest - len(row)), [1] * len(row)
        zeros = [0] * len(padding)
        ids.append(row + padding if side == "right" else padding + row)
        masks.append(ones + zeros if side == "right" else zeros + ones)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


def plain_logits(model: UniLMForSeq2SeqLM, source: list[int], target: list[int]) -> Tensor:
    """Scores, [vocabulary], of the token after `target`, from the whole of source, target and [MASK]. In float64."""
    config = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    tokens = torch.tensor([*source, *target, config.mask_token_id])
    count, length = len(tokens), len(source)
    segments = torch.tensor([config.source_type_id] * length + [config.target_type_id] * (count - length))

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + config.layer_norm_eps).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    def sees(query: int, key: int) -> bool:
        if key < length:
            return True  # everything sees the source
        return query >= length and key <= query  # the target sees itself and what came before

    visible = torch.tensor([[sees(query, key) for key in range(count)] for query in range(count)])
    embeddings = "bert.embeddings"
    x = weights[f"{embeddings}.word_embeddings.weight"][tokens]
    x = x + weights[f"{embeddings}.position_embeddings.weight"][torch.arange(count)]
    x = norm(x + weights[f"{embeddings}.token_type_embeddings.weight"][segments], f"{embeddings}.LayerNorm")
    width = config.hidden_size // config.num_attention_heads
    for index in range(config.num_hidden_layers):
        layer = f"bert.encoder.layer.{index}"
        query, key, value = (linear(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        contexts = []
        for head in range(config.num_attention_heads):
            part = slice(head * width, (head + 1) * width)
            scores = query[:, part] @ key[:, part].T / math.sqrt(width)
            contexts.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ value[:, part])
        context = linear(torch.cat(contexts, dim=-1), f"{layer}.attention.output.dense")
        x = norm(context + x, f"{layer}.attention.output.LayerNorm")
        inner = linear(gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = norm(inner + x, f"{layer}.output.LayerNorm")
    head = "cls.predictions"
    x = norm(gelu(linear(x[-1], f"{head}.transform.dense")), f"{head}.transform.LayerNorm")
    return x @ weights[f"{embeddings}.word_embeddings.weight"].T + weights[f"{head}.bias"]
