"""Length buckets of a call: inputs of similar length run together, with little padding.

The encoder runs on one bucket of `fastgen.decoding.unpadding` after the other, without the padding after its
inputs. The prefill of a decoder-only model does the same, without the padding before its prompts. The result is zero in
padded positions, which decoders and later steps mask.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen import patching, releases
from fastgen.decoding import unpadding
from fastgen.decoding.layer_forms import has_former_forward, runs_own_forward
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.cache import layers_of
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.encoders.stacks import RIGHT_PADDED, way_of
from fastgen.optimizer.transformers.encoders.unpadded_forward import (
    Buckets,
    UnpaddedForward,
    holds_no_tensor,
    override_attention,
)
from fastgen.optimizer.transformers.models import parts_that_decode

# Modules whose decoders are known to give the same result whatever padding precedes the prompt: equivalence tests run
# them. Other decoders may count from the first column of the batch. Encoders are listed in `encoders/stacks.py`.
DECODERS = frozenset(
    f"transformers.models.{name}.modeling_{name}"
    for name in """
        apertus arcee axk1 biogpt bitnet bloom codegen cohere cohere2 ctrl cwm deepseek_v2 deepseek_v3
        ernie4_5 ernie4_5_moe exaone4 falcon gemma gemma2 gemma3 gemma3n gemma4 glm glm4 glm4_moe
        glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoeshared helium
        hunyuan_v1_dense hyperclovax idefics3 internvl jais2 llama llava llava_next llava_onevision
        mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mistral4 mixtral
        modernbert_decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
        qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl seed_oss smollm3 smolvlm solar_open
        stablelm starcoder2 vaultgemma xglm youtu
    """.split()
)
# Prefixes of arguments of `generate` that the library does not pass to the encoder.
_OF_DECODER = ("decoder_", "cross_attn")
# Inputs with a column for each position of the prompt.
PER_POSITION = ("attention_mask", "position_ids")
_FURTHER_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")

Prefill = Callable[[Tensor, dict[str, Any]], Any]
"""The library's `_prefill` of tokens [rows, length] with the model's other inputs."""


def encode(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Wraps `GenerationMixin._prepare_text_encoder_decoder_kwargs_for_generation(inputs_tensor, ...)`."""
    call = Call.current(model)
    if call is None or not patching.is_active():
        return wrapped(*args, **kwargs)
    with call.decides():
        bound = inspect.signature(_encode).bind(call, wrapped, *args, **kwargs)
    with override_attention():
        return _encode(*bound.args, **bound.kwargs)


def _encode(
    call: Call,
    wrapped: Any,
    inputs_tensor: Tensor,
    model_kwargs: dict[str, Any],
    model_input_name: str | None,
    generation_config: Any,
) -> dict[str, Any]:
    ids, config, mask = inputs_tensor, generation_config, model_kwargs.get("attention_mask")
    with call.decides():
        is_text = model_input_name == "input_ids" and isinstance(ids, Tensor) and not ids.is_floating_point()
        sources = None if call.entering is None or call.model.training else call.entering.sources_of(call.model)
        if mask is None and sources is not None and is_text and len(ids) == 1:
            mask = torch.ones_like(ids)
        others = (name for name, value in model_kwargs.items() if not holds_no_tensor(value))
        # The encoder gets no other tensors than the tokens and their mask.
        is_all = all(name == "attention_mask" or name.startswith(_OF_DECODER) for name in others)
        reads_rows = is_text and is_all and _reads_rows_alone(call, ids, mask, config)
        if reads_rows and mask is not None and not bool(_begins_with_tokens(mask)):
            sources = None  # leading padding shifts positions; rows without tokens are read whole
    if not reads_rows or mask is None:
        return dict(wrapped(ids, model_kwargs, model_input_name, config))
    run = partial(_encode_buckets, call, wrapped, model_kwargs, model_input_name, config)
    if sources is None:
        return run(ids, mask)

    def states_of(ids: Tensor, mask: Tensor) -> Tensor:
        outputs = run(ids, mask)["encoder_outputs"]
        _check_nothing_else("the encoder", outputs, "last_hidden_state")
        sources.kind, state = type(outputs), outputs.last_hidden_state
        assert isinstance(state, Tensor), "the library's encoders give one"
        return state

    call.has_intervened = True  # until all are encoded: the library's own encoder call could have returned them
    encoded = sources.encode(states_of, ids, mask, row_adapters.chosen(call.model))
    call.has_intervened = False
    return {**model_kwargs, "encoder_outputs": sources.kind(last_hidden_state=encoded)}


def _begins_with_tokens(mask: Tensor) -> Tensor:
    """Whether each row of a mask [rows, length] starts with a token, and has padding only after its tokens."""
    return mask[:, :1].all() & (mask[:, 1:] <= mask[:, :-1]).all()


def _reads_rows_alone(call: Call, ids: Tensor, mask: Any, config: Any) -> bool:
    """Whether the encoder is known to read each row independently, without padding, and returns nothing else."""
    encoder = call.model.get_encoder()
    original = patching.original_of(type(encoder).forward)
    is_hooked = way_of(encoder) is not None and original is not None
    is_hooked = is_hooked and getattr(encoder, "_compiled_call_impl", None) is None  # a compiled one skips its layers
    is_hooked = is_hooked and (runs_own_forward(encoder) or has_former_forward(encoder, original))
    return is_hooked and _has_known_padding(encoder, ids, mask, config)


def _encode_buckets(
    call: Call,
    wrapped: Any,
    model_kwargs: dict[str, Any],
    model_input_name: str | None,
    config: Any,
    ids: Tensor,
    mask: Tensor,
) -> dict[str, Any]:
    """Returns what the library returns for these rows, encoded in buckets if that pays."""
    encoder, given = call.model.get_encoder(), {**model_kwargs, "attention_mask": mask}
    with call.decides():
        buckets = _buckets(call, encoder, ids, mask, config)
        unpadded = UnpaddedForward(encoder, RIGHT_PADDED, mask.bool(), 0.0, buckets=buckets)
    if not buckets:
        return dict(wrapped(ids, given, model_input_name, config))
    if has_former_forward(encoder, patching.original_of(type(encoder).forward)):
        vars(encoder).pop("forward", None)  # accelerate has left it; another thread may have dropped it meanwhile
    call.has_intervened = True  # until buckets are merged: the library's own encoder call could have returned this
    with patching.held(UnpaddedForward.current, unpadded):
        result = dict(wrapped(ids, given, model_input_name, config))
    if not unpadded.has_run:
        raise RuntimeError("the layers of the encoder have not been called")
    call.has_intervened = False
    return result


def ignores_padding(model: Any) -> bool:
    """Whether a decoder-only model is known to give the same result whatever padding precedes the prompt."""
    return all(map(is_decoder, parts_that_decode(model)))


def is_decoder(part: Any) -> bool:
    """Whether a part of a model that generates is one of `DECODERS`."""
    return type(part).forward.__module__ in DECODERS


def reads_tokens_alone(model: Any, ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether the prefill of such a model reads only tokens and per-token inputs: no images."""
    given = {name: value for name, value in model_kwargs.items() if isinstance(value, Tensor)}
    return (
        ignores_padding(model)
        and all(name in PER_POSITION and value.shape == ids.shape for name, value in given.items())
        and not any(model_kwargs.get(name) for name in releases.read_in_prefill())
    )


def prefill_in_groups(call: Call, run: Prefill, ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Returns what the library's `_prefill` returns for prompts [batch, longest]: at least the logits of the last
    position.

    The cache in `model_kwargs` contains FastGen's layers, and gets filled.
    """
    buckets: Buckets = []
    if (
        reads_tokens_alone(call.model, ids, model_kwargs)
        and releases.cache_in(model_kwargs).get_seq_length() == 0
        and config.prefill_chunk_size is None
        and not call.cache_is_the_users  # it would contain K and V of the padding
    ):
        buckets = _buckets(call, call.model, ids, model_kwargs.get("attention_mask"), config, in_front=True)
    return _prefill_buckets(buckets, run, ids, model_kwargs) if buckets else run(ids, model_kwargs)


def _prefill_buckets(buckets: Buckets, run: Prefill, ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
    cache = releases.cache_in(model_kwargs)
    layers = cache.layers  # empty, or none yet
    stored: list[tuple[Tensor, ...]] = []
    logits: Tensor | None = None
    outputs: Any = None
    for rows, positions in buckets:
        part = {name: value[rows, positions] for name, value in model_kwargs.items() if name in PER_POSITION}
        cache.layers = copy.deepcopy(layers)
        outputs = run(ids[rows, positions], {**model_kwargs, **part})
        if releases.cache_in(outputs) is not cache:
            return outputs  # the caller checks this, too
        _check_nothing_else("the model", outputs, "logits", releases.cache_name())
        last, filled = outputs.logits[:, -1:], [layer.kv.read() for layer in layers_of(cache)[0]]
        if logits is None:
            logits = last.new_empty(ids.shape[0], *last.shape[1:])
            stored = [tuple(x.new_zeros(len(ids), x.shape[1], ids.shape[1], x.shape[3]) for x in kv) for kv in filled]
        logits[rows] = last
        for kv, (keys, values) in zip(filled, stored, strict=True):
            keys[rows, :, positions], values[rows, :, positions] = kv
    cache.layers = layers
    for index, (keys, values) in enumerate(stored):
        cache.update(keys, values, index)
    outputs.logits = logits
    return outputs


def _buckets(call: Call, part: Any, ids: Tensor, mask: Any, config: Any, in_front: bool = False) -> Buckets:
    """Returns the rows of each bucket, and their positions; [] if buckets do not pay, or more than the result is read.

    `part` is the encoder, or the decoder-only model; `in_front` tells whether padding precedes the tokens.
    """
    if (
        not _has_known_padding(part, ids, mask, config)
        or ids.shape[0] == 1
        # A returned cache includes K and V of padding; a call that enters slots returns no cache.
        or (config.return_dict_in_generate and call.entering is None)
        or call.rows_depend_on_each_other
    ):
        return []
    return unpadding.by_mask(mask, in_front)


def _has_known_padding(part: Any, ids: Tensor, mask: Any, config: Any) -> bool:
    """Whether rows may run without padding: the mask shows where padding is, and no further outputs are returned."""
    returns_more = any(getattr(source, name, False) for source in (config, part.config) for name in _FURTHER_OUTPUTS)
    is_of_ids = isinstance(mask, Tensor) and ids.dim() == 2 and mask.shape == ids.shape
    # On other devices than the CPU, reading the lengths would synchronize.
    return is_of_ids and ids.device.type == "cpu" and not returns_more


def _check_nothing_else(what: str, outputs: Any, *known: str) -> None:
    """Raises RuntimeError if there are further outputs, which cannot be merged."""
    others = [name for name, value in outputs.items() if name not in known and value is not None]
    if others:
        raise RuntimeError(f"{what} gives {', '.join(others)} besides {known[0]}")
