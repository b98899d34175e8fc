"""Facts about models: which are accelerated, whose rows depend on each other, which have captured steps."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules import module as any_module
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin, is_deepspeed_zero3_enabled, is_fsdp_managed_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen import patching, releases
from fastgen.decoding import guards, library_code
from fastgen.decoding.guards import IdentityGuard
from fastgen.decoding.layer_forms import runs_own_forward
from fastgen.decoding.library_code import modules_of
from fastgen.optimizer.transformers import cache_layers, special_models
from fastgen.optimizer.transformers.capturable import CAPTURABLE, KOSMOS2, WITH_HOOKS, class_of
from fastgen.releases import Usual

# Rotary embeddings of these types have frequencies that depend on the longest row of the batch.
_ADAPTIVE_ROPE = ("dynamic", "longrope")
_ROPE = frozenset({"rope_type", "rope_parameters", "rope_scaling"})
# With this option, rows compete for the capacity of an expert.
_EXPERT_CAPACITY = "moe_eval_capacity_token_fraction"
_COUPLING = _ROPE | {_EXPERT_CAPACITY}
_HOOKED = Usual("forward hooks are registered on the model")
_BY_ROW = Usual("hooks of peft give each row an adapter of its own")
# Adapter methods, named by their package in peft, whose layers compute each token independently. Not among them: Lily
# mixes experts by the mean of all tokens of a batch, and PVeRA may sample.
ADAPTERS = frozenset(
    "adalora adamss adaption_prompt beft boft bone c3a deft delora fourierft frod glora gralora hira hra ia3 ln_tuning "
    "loha lokr lora miss oft osf peanut psoft randlora road shira supertuning tinylora trainable_tokens unilora vblora "
    "vera waveft".split()
)
# Inputs that give the type of each token. A step gets the type of the last token, because generated tokens are text.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Classes whose tokens for an input are known not to depend on the other inputs of a batch: composites of two models,
# parts of them, and models that read images or audio.
_INDEPENDENT = frozenset(
    """
    AudioFlamingo3ForConditionalGeneration AyaVisionForConditionalGeneration BartModel BertLMHeadModel
    BlipTextLMHeadModel CamembertForCausalLM Cohere2VisionForConditionalGeneration ElectraForCausalLM
    EncoderDecoderModel Ernie4_5_VLMoeForConditionalGeneration Ernie4_5_VLMoeTextModel FSMTForConditionalGeneration
    Florence2ForConditionalGeneration GPT2LMHeadModel GitForCausalLM Glm4vForConditionalGeneration Glm4vTextModel
    GlmAsrForConditionalGeneration Idefics2ForConditionalGeneration Lfm2VlForConditionalGeneration
    LongT5ForConditionalGeneration MBartForCausalLM MoonshineForConditionalGeneration MvpForConditionalGeneration
    PLBartForConditionalGeneration PaliGemmaForConditionalGeneration Pix2StructForConditionalGeneration
    Pix2StructTextModel Qwen2AudioForConditionalGeneration RobertaForCausalLM SeamlessM4TForSpeechToText
    SeamlessM4TForTextToText SeamlessM4Tv2ForSpeechToText SeamlessM4Tv2ForTextToText
    Speech2TextForConditionalGeneration SpeechEncoderDecoderModel SpeechT5ForSpeechToText TrOCRForCausalLM
    UdopForConditionalGeneration VisionEncoderDecoderModel VoxtralForConditionalGeneration XLMRobertaForCausalLM
    """.split()
)
# `generate` treats this class as decoder-only, but it takes an encoder's output, as the inputs below, and stores its K
# and V beside its own in a cache that it makes itself.
_READS_STATES = "BlipTextLMHeadModel"
STATES, STATES_MASK = "encoder_hidden_states", "encoder_attention_mask"
# These count positions from the cache length, and some of them from the non-padding tokens of a pass. After a padding
# token, the positions of a verify would differ from those of single steps.
_COUNTING = frozenset(
    """
    BertLMHeadModel BlipTextLMHeadModel CamembertForCausalLM Data2VecTextForCausalLM ElectraForCausalLM ErnieForCausalLM
    Kosmos2TextForCausalLM Kosmos2_5ForConditionalGeneration MegatronBertForCausalLM RobertaForCausalLM
    RobertaPreLayerNormForCausalLM SeamlessM4TForSpeechToText SeamlessM4TForTextToText SeamlessM4Tv2ForSpeechToText
    SeamlessM4Tv2ForTextToText Speech2TextForConditionalGeneration SpeechT5ForSpeechToText TrOCRForCausalLM
    XLMRobertaForCausalLM XLMRobertaXLForCausalLM
    """.split()
)
# No verify has more tokens of a row than this.
_MOST_VERIFIED = 16
_PALIGEMMA = "PaliGemmaForConditionalGeneration"
# The decoder attends to the whole source, whatever mask `generate` is given: Whisper's mask counts the frames of a
# recording, and an image model may be given a mask of image patches. MusicGen Melody has zeros where there is padding.
_SOURCE_WITHOUT_MASK = frozenset(
    ("MusicgenMelodyForConditionalGeneration", "VisionEncoderDecoderModel", "WhisperForConditionalGeneration")
)
# Models with an indexer whose positions, three for each token, the cache's layers keep beside its keys.
_KEEP_INDEXER_POSITIONS = frozenset(("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"))

# Inputs that the library passes to steps, which do not read them. Qwen2-Audio reads this one only together with audio,
# and MusicGen turns its audio prompt into tokens first.
_UNREAD = {
    **dict.fromkeys(_SOURCE_WITHOUT_MASK, ("attention_mask",)),
    KOSMOS2: ("image_embeds", "image_embeds_position_mask"),
    "Kosmos2_5ForConditionalGeneration": ("flattened_patches", "image_embeds_position_mask", "width", "height"),
    "UdopForConditionalGeneration": ("bbox", "visual_bbox"),
    "Qwen2AudioForConditionalGeneration": ("feature_attention_mask",),
    "MusicgenForConditionalGeneration": ("prefill_outputs", "input_values", "padding_mask", "audio_scales"),
}


def masks_source(model: Any) -> bool:
    """Whether `attention_mask` determines which source positions the decoder attends to."""
    return class_of(model) not in _SOURCE_WITHOUT_MASK


def reads_states(model: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether a model without an encoder gets an encoder's states as an input, [rows, positions, width]."""
    return class_of(model) == _READS_STATES and isinstance(model_kwargs.get(STATES), Tensor)


def mask_of_source(model: Any, mask: Tensor, encoded: Any) -> Tensor | None:
    """Returns which positions of an encoder's output the decoder attends to, [inputs, positions]; None if unknown.

    Args:
        mask: mask of the encoder's input, [inputs, ...]; it may have more positions, such as frames of audio.
        encoded: the encoder's output.
    """
    length, encoder = encoded[0].shape[1], model.get_encoder()
    if mask.shape[1:] == (length,):
        return mask
    for part in (encoder, getattr(encoder, "prenet", encoder)):
        if hasattr(part, "_get_feature_vector_attention_mask"):
            found: Tensor = part._get_feature_vector_attention_mask(length, mask)
            return found
    if hasattr(model, "_compute_sub_sample_lengths_from_attention_mask"):
        lengths = model._compute_sub_sample_lengths_from_attention_mask(mask)
        return torch.arange(length, device=mask.device) < lengths.unsqueeze(1)
    return None


def axis_of_rows(name: str, value: Tensor) -> int:
    """Returns the axis of rows in a model input: it is not the first one for positions in time, height and width."""
    return 1 if name == "position_ids" and value.dim() == 3 else 0


def axis_of_hidden_rows(model: Any) -> int:
    """Which axis of hidden states of four dimensions is their rows: AltUp has its predictions in front."""
    return 1 if hasattr(text_config(model.config), "altup_num_inputs") else 0


def notes_positions(model: Any) -> bool:
    """Whether the prefill stores the positions of later steps in the model, for steps that are not given positions."""
    return any(name in vars(part) for part in (model, model.base_model) for name in library_code.NOTED_BY_PREFILL)


def unread_inputs(model: Any) -> tuple[str, ...]:
    """Returns the inputs of `generate` that the model's steps do not read, whatever their shape is.

    `Seq2SeqTrainer` passes the labels of a batch, too. The library's preparation of inputs drops them, also if a
    model's own preparation calls it.
    """
    unread: tuple[str, ...] = _UNREAD.get(class_of(model), ())
    name = "prepare_inputs_for_generation"
    method = inspect.getattr_static(type(model), name)
    is_librarys = method is vars(GenerationMixin)[name] or "super" in inspect.unwrap(method).__code__.co_names
    return (*unread, "labels") if is_librarys else unread


def unsupported(model: Any) -> str | None:
    """Returns why calls of this model are not accelerated, as far as the model alone tells; None if they are."""
    kind, unusual = type(model), guards.unusual()
    if unusual is not None:
        return Usual(unusual)
    failed = releases.failed_before(kind)
    if failed is not None:
        return failed
    if not patching.stands_for("GenerationMixin._prefill"):
        return "FastGen cannot hook the prefill of this release of Transformers (_prefill)"
    if _is_sharded(model):
        return Usual("a model sharded over processes")
    for method in ("_prefill", "_sample", "_beam_search"):
        # Looked up without binding: a patched method is a new object each time it is bound.
        own = inspect.getattr_static(kind, method, None)
        if own is None or own is not vars(GenerationMixin).get(method) or method in vars(model):
            return f"{kind.__name__} has a decoding loop of its own ({method})"
    if hasattr(model, "_reorder_cache"):
        return f"{kind.__name__} reorders its cache itself (_reorder_cache)"
    if cache_layers.states_are_unknown(model):
        return f"{kind.__name__} keeps state other than K/V"
    for method in ("forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        if not library_code.is_own(getattr(kind, method)):
            return f"{kind.__name__}.{method} is not the library's own"
        is_its_own = method not in vars(model) or (method == "forward" and runs_own_forward(model))
        if not is_its_own and not (method == "forward" and hasattr(model, "_old_forward")):  # accelerate's hook
            return Usual(f"{method} has been replaced on this model")
    config = text_config(model.config)
    if getattr(config, "cross_attention_layers", None):
        return "K and V of pictures in the cache of the text"  # Mllama
    if hasattr(model.base_model, "_cached_decode_position_ids"):
        return "positions of steps that the model keeps from its prefill"  # GlmImage, with a row for each sequence
    if class_of(model) in _KEEP_INDEXER_POSITIONS:
        return "positions that an indexer keeps in the cache"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked attention"
    if getattr(config, "keep_window_size", None) is not None:
        return "attention that chooses among the values of the cache"  # Doge, whose choice depends on padding
    if config._attn_implementation not in ("eager", "sdpa"):
        return Usual(f"attention implementation {config._attn_implementation}")
    return modules_unsupported(model)


def why_no_drafts(model: Any) -> str | None:
    """Returns why no draft can be verified, because rejected positions cannot be dropped; None if drafts can be."""
    if cache_layers.states_are_kept(model, text_config(model.config)):
        return "a model with states that cannot go back"
    if special_models.reads_codebooks(model):
        return "rows of tokens that are codebooks"
    capacity = getattr(text_config(model.config), "expert_capacity", None)
    if capacity is not None and capacity < _MOST_VERIFIED:
        return "experts that take fewer tokens of a sequence than a verify has"
    if any(class_of(part) in _COUNTING for part in parts_that_decode(model)):
        return "positions that the model counts from what it has stored and the tokens of a pass"
    return None


def text_config(config: Any) -> Any:
    """Returns the configuration of the part that generates. For an encoder-decoder model with a flat configuration, the
    library makes a copy: in each call, that would take longer than all other checks.
    """
    is_flat = type(config).get_text_config is PreTrainedConfig.get_text_config and not any(
        getattr(config, name, None) is not None for name in ("decoder", "generator", "text_config")
    )
    return config if is_flat else config.get_text_config(decoder=True)


def takes_more_than_text(model: Any) -> bool:
    """Whether the prefill of a model without an encoder may also read images or audio."""
    return not model.config.is_encoder_decoder and text_config(model.config) is not model.config


def pictures_in_front(model: Any) -> int:
    """Returns how many picture positions the cache has before the tokens, for which GIT itself widens the mask."""
    if class_of(model) != "GitForCausalLM":
        return 0
    count: int = model.git.encoder.layer[0].attention.self.image_patch_tokens
    return count


def parts_that_decode(model: Any) -> list[Any]:
    """Returns the model, and the inner model that generates if it has its own configuration: its class may be any."""
    return [model] if text_config(model.config) is model.config else [model, model.get_decoder()]


def _is_sharded(model: Any) -> bool:
    """Whether parts of the model are in several processes, which wait for each other in every forward pass.

    Such processes must run the same passes on the same rows. FastGen decides these by values that one process sees:
    which inputs are equal, how long they are, which have ended.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return (
        getattr(model, "_device_mesh", None) is not None  # distributed by Transformers
        or is_deepspeed_zero3_enabled()
        or is_fsdp_managed_module(model)
        or any(type(parameter).__module__.startswith("torch.distributed.") for parameter in model.parameters())
    )


def modules_unsupported(model: Any) -> str | None:
    """Returns why a module of the model prevents acceleration; None if none does.

    Dropout draws for every row of a batch, and a hook sees every row: neither may get a smaller batch than usual. The
    same holds for peft's hooks that tell each row's adapter. A compiler would trace FastGen's layers and cache, and
    recompile what the library's own code has compiled. The library's own hooks (which record attentions and hidden
    states) and those of accelerate are fine.
    """
    if has_global_hooks():
        return _HOOKED
    may_have_adapters = "peft" in sys.modules
    for module in modules_of(model):
        if library_code.is_in_training(module):
            return Usual("the model, or a part of it, is in training mode")
        if library_code.is_compiled(module):
            return Usual("the model, or a part of it, is compiled")
        if library_code.has_foreign_hooks(module):
            return _HOOKED
        reason = _adapters_unsupported(module) if may_have_adapters else None
        if reason is not None:
            return reason
    return None


def _adapters_unsupported(module: Any) -> str | None:
    """Returns why peft adapters in a module prevent acceleration; None if they do not."""
    if library_code.row_hooks(module):
        return _BY_ROW
    kind: type = type(module)
    adapter = _kind_of_adapter(kind)
    return None if adapter is None or adapter in ADAPTERS else Usual(f"adapters of the kind {adapter}")


@functools.cache
def _kind_of_adapter(kind: type) -> str | None:
    """Returns the peft package of a layer's class, such as `lora`; None for a layer without adapters."""
    package, _, inside = kind.__module__.removeprefix("peft.tuners.").partition(".")
    return package if inside and kind.__module__.startswith("peft.tuners.") else None


def has_global_hooks() -> bool:
    """Whether hooks are registered that see the forward passes of all modules."""
    return bool(any_module._global_forward_hooks or any_module._global_forward_pre_hooks)


def attention_functions() -> Hashable:
    """Returns the attention functions registered in the library, which a recording depends on besides the model."""
    return tuple([(name, IdentityGuard.of(function)) for name, function in ALL_ATTENTION_FUNCTIONS.items()])


def has_independent_rows(part: Any) -> bool:
    """Whether the rows of a part that generates are known to be independent. The encoder does not matter: it runs per
    input.
    """
    return runs_own_forward(part) and library_code.is_own(type(part).forward) and class_of(part) in _INDEPENDENT


def rows_depend_on_each_other(model: Any) -> bool:
    """Whether the model's output for an input depends on the other inputs of the batch, or on their lengths."""
    holders = {}
    for module in model.modules():
        kind: type = type(module)
        own = vars(module)
        if kind.__module__.startswith("torch.ao."):
            return True  # dynamically quantised layers have one scale for all rows
        if not _COUPLING.isdisjoint(own) or _class_has(kind, *_COUPLING):
            holders[id(module)] = module
        config = module.config if "config" in own or _class_has(kind, "config") else None
        if config is not None:
            holders[id(config)] = config
    ropes = (getattr(holder, name, None) for holder in holders.values() for name in _ROPE)
    return any(getattr(holder, _EXPERT_CAPACITY, None) is not None for holder in holders.values()) or any(
        rope is not None and any(kind in repr(rope) for kind in _ADAPTIVE_ROPE) for rope in ropes
    )


def has_growing_frequencies(model: Any) -> bool:
    """Whether a forward pass changes the model: it keeps the position frequencies of the longest sequence so far.

    It reads that length on the host, so no step is captured; but an attempt would leave the frequencies changed.
    """
    config = text_config(model.config)
    return any("dynamic" in repr(getattr(config, name, None)) for name in _ROPE - {"rope_type"})


@functools.cache
def _class_has(kind: type, *names: str) -> bool:
    return any(hasattr(kind, name) for name in names)


def has_captured_steps(model: Any) -> bool:
    """Whether a step of this model is known to read the cache in a way that buffers of fixed size allow.

    Only trying tells whether it can be captured.
    """
    return all(
        _runs_with_static_cache(part)
        or hasattr(type(part), "step_positions")
        or class_of(part) in CAPTURABLE
        or patching.stands_for(WITH_HOOKS.get(class_of(part), ""))
        for part in parts_that_decode(model)
    )


def may_begin_again(model: Any, prompt: int, length: int) -> bool:
    """Whether a model may drop its cache and read all tokens again in a call from `prompt` to `length` positions.

    Phi-3 does so when the frequencies of short sequences give way to those of long ones, in its preparation of inputs,
    which a captured step does not run.
    """
    config = text_config(model.config)
    switch = getattr(config, "original_max_position_embeddings", None)
    switches = switch is not None and prompt <= switch < length
    return switches and any("longrope" in repr(getattr(config, name, None)) for name in _ROPE)


def reads_padding(model: Any, config: Any) -> bool:
    """Whether the model accepts the padding that the library feeds it for a finished input, rather than raising.

    With beams, those of a finished input continue instead.
    """
    pad, text = config._pad_token_tensor, text_config(model.config)
    size = getattr(text, "decoder_vocab_size", None) or getattr(text, "vocab_size", None)
    return config.num_beams > 1 or pad is None or size is None or 0 <= int(pad) < size


def counts_on_the_host(model: Any) -> bool:
    """Whether a forward pass gives the same result for a static cache whose length is a Python number as for one whose
    length is on the device.

    Models that the library does not run with a static cache may then take its capacity for the length.
    """
    return all(map(_runs_with_static_cache, parts_that_decode(model)))


def _runs_with_static_cache(part: Any) -> bool:
    return getattr(part, "_can_compile_fullgraph", False)


def hands_on_more(model: Any) -> bool:
    """Whether a model may pass more to the next step than the KV cache, with unknown rows."""
    name = "_update_model_kwargs_for_generation"
    is_own = inspect.getattr_static(type(model), name, None) is not vars(GenerationMixin).get(name)
    return is_own and class_of(model) != _PALIGEMMA  # it only passes token types


def reads_mask_of_tokens(model: Any) -> bool:
    """Whether the model's steps need a mask with one row a sequence, of all positions of the cache.

    Falcon computes its bias from it, and Kosmos-2 takes no other. BLOOM makes that mask itself.
    """
    return class_of(model) == KOSMOS2 or (class_of(model) == "FalconForCausalLM" and bool(model.config.alibi))


def type_of_generated(model: Any) -> int | None:
    """Returns the `token_type_ids` value of generated tokens; None to repeat that of the prompt's last token."""
    return 1 if class_of(model) == _PALIGEMMA else None


def positions_of_step(model: Any) -> int:
    """Returns how many positions a step stores; all but the first are dropped again. FastGen's own models define it."""
    return getattr(type(model), "step_positions", 1)
