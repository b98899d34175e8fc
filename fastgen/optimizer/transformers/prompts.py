"""The first pass of a decoder-only model runs on prompts of about the same length at a time: padding costs little.

The groups are those of `fastgen.decoding.length_buckets`, as for encoders. Each group runs without the padding that all
of its prompts have in front; its K/V goes to its rows and positions of the store. The positions that were left out are
zero there, and later steps mask them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastgen.decoding import length_buckets
from fastgen.optimizer.transformers.call import Call

# The modules of Transformers whose decoders are known to give the same whatever padding is in front: equivalence tests
# run them. Others may count positions from the first column of the batch.
_DECODERS = frozenset(
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "bloom",
        "gemma",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "llama",
        "mistral",
        "mixtral",
        "opt",
        "phi",
        "qwen2",
        "qwen3",
    )
)
# Inputs with a column for each position of the prompt.
_PER_POSITION = ("attention_mask", "position_ids")
_FURTHER_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")

Pass = Callable[[Tensor, Any, dict[str, Any], bool], Any]


def first_pass(
    call: Call, wrapped: Pass, ids: Tensor, config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool
) -> Any:
    """What `wrapped` gives for the prompts, [batch, longest]: the logits of the last position at least.

    The cache of `model_kwargs` has FastGen's layers in it, and is filled.

    Args:
        wrapped: `GenerationMixin._prefill`.
    """
    cut: list[tuple[Tensor, int]] = []
    if _can_be_cut(call, ids, config, model_kwargs):
        mask = model_kwargs["attention_mask"]
        cut = length_buckets.by_length(length_buckets.lengths(mask.flip(1)).tolist(), ids.shape[1])
    if len(cut) < 2:
        return wrapped(ids, config, model_kwargs, is_first_iteration)
    return _in_groups(cut, wrapped, ids, config, model_kwargs, is_first_iteration)


def _in_groups(
    cut: list[tuple[Tensor, int]],
    wrapped: Pass,
    ids: Tensor,
    config: Any,
    model_kwargs: dict[str, Any],
    is_first_iteration: bool,
) -> Any:
    cache = model_kwargs["past_key_values"]
    layers = cache.layers  # empty, or none yet
    stored: list[tuple[Tensor, Tensor]] = []
    logits = outputs = None
    for rows, length in cut:
        part = {name: value[rows, -length:] for name, value in model_kwargs.items() if name in _PER_POSITION}
        cache.layers = copy.deepcopy(layers)
        outputs = wrapped(ids[rows, -length:], config, {**model_kwargs, **part}, is_first_iteration)
        if outputs.get("past_key_values") is not cache:
            return outputs  # the caller looks at that too
        last = _last_logits(outputs)
        if logits is None:
            logits = last.new_empty(ids.shape[0], *last.shape[1:])
            stored = [(_wide(layer.keys, ids), _wide(layer.values, ids)) for layer in cache.layers]
        logits[rows] = last
        for layer, (keys, values) in zip(cache.layers, stored, strict=True):
            keys[rows, :, -length:], values[rows, :, -length:] = layer.keys, layer.values
    cache.layers = layers
    for index, (keys, values) in enumerate(stored):
        cache.update(keys, values, index)
    outputs.logits = logits
    return outputs


def _wide(part: Tensor, ids: Tensor) -> Tensor:
    """Zeros for K or V of all prompts, like those of some, [rows, heads, positions, dim]."""
    return part.new_zeros(ids.shape[0], part.shape[1], ids.shape[1], part.shape[3])


def _last_logits(outputs: Any) -> Tensor:
    """The logits of the last position, [rows, 1, vocabulary], of a model that gives nothing else but its cache.

    Raises:
        RuntimeError: it gives something else too, of which it is not known how to put the groups together.
    """
    known = ("logits", "past_key_values")
    others = [name for name, value in outputs.items() if name not in known and value is not None]
    if others:
        raise RuntimeError(f"the model gives {', '.join(others)} besides its logits")
    return outputs.logits[:, -1:]


def _can_be_cut(call: Call, ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the model gives the same for a prompt without the padding in front, and nothing else is seen of it."""
    mask = model_kwargs.get("attention_mask")
    return (
        type(call.model).forward.__module__ in _DECODERS
        and ids.dim() == 2
        and ids.device.type == "cpu"  # elsewhere, looking at the lengths would wait for the device
        and all(
            name in _PER_POSITION and value.shape == ids.shape
            for name, value in model_kwargs.items()
            if isinstance(value, Tensor)
        )
        and isinstance(mask, Tensor)
        and model_kwargs["past_key_values"].get_seq_length() == 0
        and config.prefill_chunk_size is None
        # What it returns, and the user's cache, have the K/V of the padding in them.
        and not config.return_dict_in_generate
        and not call.cache_is_the_users
        and not any(getattr(source, name, False) for source in (config, call.model.config) for name in _FURTHER_OUTPUTS)
        and not call.rows_depend_on_each_other
    )
