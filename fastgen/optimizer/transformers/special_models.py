"""What some kinds of models need besides the general hooks: codebooks, latents, sparse attention, Bark."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgen import releases
from fastgen.decoding import library_code
from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.view import KVView, of_latents
from fastgen.decoding.layer_forms import Replacement, is_plain, runs_own_forward
from fastgen.ops.stored_topk import stored_topk
from fastgen.optimizer.transformers.cache_layers import StepCache
from fastgen.optimizer.transformers.index_layers import StepIndexedLayer

# ---- codebooks: models that read several rows of tokens per input, one for each codebook of the audio codec
#
# Each codebook is some steps later than the one before. A delay mask holds the token that the model reads at each
# position in place of the generated one, or -1. With guidance, the model reads each input twice, the second time
# without its condition.

# Inputs with the delay mask, [rows of tokens, max_length].
DELAYS = ("decoder_delay_pattern_mask", "delay_pattern_mask")


class Codebooks(NamedTuple):
    """How rows of tokens map to rows of the model."""

    each: int = 1  # rows of tokens per input
    copies: int = 1  # rows of the model per input: all inputs, and with guidance all of them once more

    @classmethod
    def of(cls, model: Any, model_kwargs: Mapping[str, Any]) -> Codebooks:
        """Returns the mapping of a model that gets these inputs."""
        if not any(isinstance(model_kwargs.get(name), Tensor) for name in DELAYS):
            return cls()
        scale = model_kwargs.get("guidance_scale")
        guided = scale is not None and scale > 1
        return cls(getattr(model, "decoder", model).num_codebooks, 2 if guided else 1)

    def rows(self, tokens: int) -> int:
        """Returns the number of rows of the model for a number of rows of tokens."""
        return tokens // self.each * self.copies

    def of_rows(self, numbers: Tensor) -> Tensor:
        """Maps values of rows of tokens, equal in all codebooks of an input, to values of rows of the model."""
        return numbers if self == PLAIN else numbers[:: self.each].repeat(self.copies)


# Every row of tokens is a row of the model.
PLAIN = Codebooks()


def reads_codebooks(model: Any) -> bool:
    """Whether a model reads codebooks."""
    return hasattr(getattr(model, "decoder", model), "apply_delay_pattern_mask")


def without_nothing(mask: Tensor, stored: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns a mask of a source, [rows, positions], with ones in rows that are fully masked and have K and V of zeros,
    as the second half with guidance. Attention returns zero there, whatever it attends to.
    """
    empty = ~(mask != 0).any(dim=1)
    for keys, values in stored:
        if keys[empty].any() or values[empty].any():
            return mask
    return torch.where(empty.unsqueeze(1), torch.ones_like(mask), mask)


# ---- multi-head latent attention: all heads derive their K and V from one vector per position, which the cache holds
#
# The library computes K and V of all positions in each step. Here, views replace them, and attention reads the latents
# (`decoding.kv.view.of_latents`).


def expand_kv(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `expand_kv(kv_nope, k_rot)`, which returns K and V."""
    layer = module.kv_b_proj
    if kwargs or len(args) != 2 or not all(isinstance(each, KVView) for each in args) or layer.bias is not None:
        return wrapped(*args, **kwargs)
    latents, rotary = args
    if not _is_a_product(layer) or not is_plain(layer, latents.dtype, latents.device.type):
        return wrapped(*args, **kwargs)
    dim = module.qk_nope_head_dim
    return of_latents(latents, rotary, layer.weight.unflatten(0, (-1, dim + module.v_head_dim)), dim)


def _is_a_product(layer: nn.Module) -> bool:
    """Whether a layer only multiplies by its weight, and no third-party code replaces it."""
    is_plain_or_ours = runs_own_forward(layer) or isinstance(layer.forward, Replacement)
    return type(layer) is nn.Linear and is_plain_or_ours and library_code.is_own(nn.Linear.forward)


# ---- sparse attention: an indexer chooses the positions that attention reads


def choose_positions(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `forward` of an indexer. In a captured step, it chooses among the positions that each query may read."""
    cache = releases.cache_in(kwargs)
    layer = cache.layers[module.layer_idx] if type(cache) is StepCache else None
    if not isinstance(layer, StepIndexedLayer) or layer.index is None:
        return wrapped(*args, **kwargs)
    layer.chooses = True
    with _ChoosesStored(layer.index):
        return wrapped(*args, **kwargs)


class _ChoosesStored(TorchFunctionMode):
    """Replaces `Tensor.topk` of scores, [rows, queries, positions]."""

    def __init__(self, index: FixedKV) -> None:
        super().__init__()
        self._index = index

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.topk or len(args) != 2 or kwargs != {"dim": -1}:
            return func(*args, **kwargs)
        scores, k = args
        if self._index.has_drafts:  # of rows of other lengths, the model's mask shows rejected ones
            scores = scores.masked_fill(~self._index.counts(), -torch.inf)
        if not scores.is_cpu:
            return scores.topk(k)
        indices = stored_topk(scores, self._index.firsts_of_rows(), k)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


# ---- Bark
#
# The model masks with a table of `max_position_embeddings` positions. A step has one query, which sees every stored
# position, and its buffers may be longer than the table. So the step attends without the table.


def attend(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `BarkSelfAttention._attn(query, key, value, attention_mask)`."""
    query, key = args[:2] if len(args) > 1 else (None, None)
    if query is None or not isinstance(key, KVView) or query.shape[-2] != 1 or type(wrapped) is not MethodType:
        return wrapped(*args, **kwargs)
    without_table = SimpleNamespace(is_causal=False, head_dim=module.head_dim, attn_dropout=module.attn_dropout)
    return wrapped.__func__(without_table, *args, **kwargs)
