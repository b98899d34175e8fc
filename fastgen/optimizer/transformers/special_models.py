"""What some kinds of models need besides the general hooks: codebooks, latents, mixtures of experts, Bark."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen import counters, interrupts, settings
from fastgen.decoding import layer_forms, library_code
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.kv.view import KVView, of_latents
from fastgen.decoding.layer_forms import Replacement, is_plain, runs_own_forward
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import choose

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


# ---- mixtures of experts: their linear ops, inside a call, are one operator each, which skips experts without tokens


def grouped_mm(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `_grouped_mm(input, weight, offs)`; the weight is [experts, K, N]."""
    found: dict[str, Any] = dict(zip(("input", "weight", "offs"), args, strict=False)) | kwargs
    given: list[Any] = [found.get(name) for name in ("input", "weight", "offs")]
    try:
        if settings.current().packed_weights != "never" and _is_served(*given):
            x, weight, ends = given
            return choose.expert_linear(x, weight.transpose(1, 2), ends)
    except Exception as error:
        interrupts.pass_on(error)
        counters.count_fallback("experts", f"{type(error).__name__}: {error}")
    return wrapped(*args, **kwargs)


def longcat_flash(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `LongcatFlashExperts.forward(hidden_states, top_k_index, top_k_weights)`, which asks the host which experts
    have tokens. In a captured step, tokens are sorted by expert. The last experts return their input.
    """
    if not is_capturing() or kwargs or len(args) != 3 or module.gate_up_proj is None:
        return wrapped(*args, **kwargs)
    from transformers.integrations import moe  # not in every release

    x, chosen, weights = args
    count = module.num_routed_experts
    numbers, order = chosen.flatten().sort()
    ends = torch.searchsorted(numbers, torch.arange(count, device=x.device), right=True, out_int32=True)
    rows = x[order // chosen.shape[1]]
    gate, up = moe._grouped_mm(rows, module.gate_up_proj[:count].transpose(1, 2), ends).chunk(2, dim=-1)
    found = moe._grouped_mm(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), ends)
    found = torch.where(numbers.unsqueeze(1) < count, found, rows) * weights.flatten()[order].unsqueeze(1)
    in_order = torch.empty_like(found).index_copy_(0, order, found)
    return in_order.unflatten(0, chosen.shape).sum(dim=1).to(x.dtype)


def _is_served(x: Any, weight: Any, ends: Any) -> bool:
    if type(weight) not in (Tensor, nn.Parameter) or type(ends) is not Tensor or weight.dim() != 3:
        return False
    if not layer_forms.serves(x, weight.dtype):
        return False
    # A recording refuses to be asked for an address, and runs no other model's code.
    is_here = is_capturing() or FastLayers.have_experts(weight)
    return is_here and choose.serves_experts(x, weight.transpose(1, 2), ends)


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
