"""Calls of `generate` that ask for assisted generation: what of them FastGen's speculative decoding serves.

Such a call becomes a plain one, with a draft that the decoding loop finds in the state of the call. If it cannot be
used there after all, the call goes on without one, with the same tokens. Anything else is left to the library.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from fastgen import releases, settings
from fastgen.decoding.captured import graph
from fastgen.decoding.speculation.draft_length import Schedule
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.models import has_captured_steps, positions_of_step, unsupported
from fastgen.optimizer.transformers.speculation.drafts import AssistantDraft, Draft, EarlyExitDraft, LookupDraft

# What asks for assisted generation, as an argument or in the generation config.
OPTIONS = ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model")
# With these the call is left to the library.
_NOT_SERVED = (
    "assistant_tokenizer", "output_attentions", "output_hidden_states", "dola_layers", "penalty_alpha",
    *releases.ASSISTANCE, *releases.CACHE_NAMES,
)  # fmt: skip
# Processors that remember the tokens they were called with.
_WITH_STATE = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def taken_over(model: Any, arguments: dict[str, Any]) -> tuple[Draft | None, dict[str, Any]]:
    """What drafts in a call that asks for it, and the arguments of the call without that.

    None, and the arguments as they are, if the call does not ask, or is left to the library.
    """
    config = arguments.get("generation_config")

    def option(name: str) -> Any:
        value = arguments.get(name)
        return value if value is not None or config is None else getattr(config, name, None)

    asked = [name for name in OPTIONS if option(name) is not None]
    if asked and _runs_users_code(model, option, arguments):
        return None, arguments
    if len(asked) != 1 or not _is_served(model, option) or _library_draws(model, option, arguments):
        return None, arguments
    if _scores_depend_on_drafts(model, option, arguments):
        return None, arguments
    draft = _draft(model, asked[0], option, arguments)
    if draft is None:
        return None, arguments
    plain = {name: value for name, value in arguments.items() if name not in OPTIONS}
    if config is not None:
        plain["generation_config"] = config = copy.copy(config)
        for name in OPTIONS:
            if hasattr(config, name):
                setattr(config, name, None)
    return draft, plain


def _runs_users_code(model: Any, option: Any, arguments: dict[str, Any]) -> bool:
    """Whether the call runs code of the user's that may tell the library's drafts from FastGen's.

    Processors see them. Criteria and streamers get what is accepted of a draft at once; of several sequences, for which
    the library has no drafts, they get what they would without.
    """
    if arguments.get("prefix_allowed_tokens_fn") or user_code.has_own(arguments.get("logits_processor") or ()):
        return True
    streamer = arguments.get("streamer")
    observers = [*(arguments.get("stopping_criteria") or ()), *([] if streamer is None else [streamer])]
    return user_code.has_own(observers) and _rows(model, option, arguments) == 1


def _is_served(model: Any, option: Any) -> bool:
    now = settings.current()
    may_capture = now.captured_step != "never" and has_captured_steps(model)
    own = model.generation_config
    return (
        may_capture
        and positions_of_step(model) == 1
        and model.device.type in ("cpu", "cuda")
        and graph.unavailable(model.device) is None
        and not any(option(name) for name in _NOT_SERVED)
        and not any(getattr(own, name, None) for name in (*OPTIONS, *_NOT_SERVED))
        and (option("num_beams") or own.num_beams or 1) == 1
        and (option("cache_implementation") or own.cache_implementation or "dynamic") == "dynamic"
    )


def _library_draws(model: Any, option: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call samples that the library serves: with the same seed, it draws other tokens than FastGen.

    Of several sequences it refuses to sample any.
    """
    own = model.generation_config
    samples = option("do_sample") if option("do_sample") is not None else own.do_sample
    if not samples or settings.current().assisted_sampling == "fastgen":
        return False
    return _rows(model, option, arguments) == 1


def _scores_depend_on_drafts(model: Any, option: Any, arguments: dict[str, Any]) -> bool:
    """Whether a processor of the library's keeps a state: in its assisted decoding, rejected tokens enter that, too.

    Of several sequences, for which the library has no drafts, there is nothing to differ from.
    """
    own = model.generation_config
    guidance, watermark = (
        value if (value := option(name)) is not None else getattr(own, name)
        for name in ("guidance_scale", "watermarking_config")
    )
    is_kept = guidance not in (None, 1) or isinstance(watermark, SynthIDTextWatermarkingConfig)
    is_kept |= any(isinstance(each, _WITH_STATE) for each in arguments.get("logits_processor") or ())
    return is_kept and _rows(model, option, arguments) == 1


def _rows(model: Any, option: Any, arguments: dict[str, Any]) -> int:
    """How many sequences are generated."""
    names = ("inputs", "input_ids", model.main_input_name, "inputs_embeds", "decoder_input_ids")
    rows = [value.shape[0] for value in map(arguments.get, names) if isinstance(value, Tensor) and value.dim()]
    return max(rows, default=1) * (option("num_return_sequences") or model.generation_config.num_return_sequences or 1)


def _draft(model: Any, name: str, option: Any, arguments: dict[str, Any]) -> Draft | None:
    value = option(name)
    if name == "assistant_model":
        return _assistant(model, value, option, arguments)
    if type(value) is not int or value < 1:
        return None  # the library says what is wrong with it
    if name == "assistant_early_exit":
        layers = getattr(getattr(model, model.base_model_prefix, None), "config", None)
        count = getattr(layers, "num_hidden_layers", None)
        serves = not model.config.is_encoder_decoder and type(count) is int and value <= count
        return EarlyExitDraft(model, value) if serves else None
    max_ngram = option("max_matching_ngram_size") or model.generation_config.max_matching_ngram_size or 2
    if type(max_ngram) is not int or max_ngram < 1:
        return None
    source = arguments.get("inputs", arguments.get("input_ids")) if model.config.is_encoder_decoder else None
    is_tokens = isinstance(source, Tensor) and source.dim() == 2 and source.dtype is torch.int64
    return LookupDraft(value, max_ngram, source if is_tokens else None, model.generation_config.pad_token_id)


def _assistant(model: Any, assistant: Any, option: Any, arguments: dict[str, Any]) -> Draft | None:
    """Another model that has an encoder if `model` has one, which reads the same, and has the same vocabulary."""
    if not isinstance(assistant, PreTrainedModel) or assistant is model or unsupported(assistant) is not None:
        return None
    same = model.config.get_text_config().vocab_size == assistant.config.get_text_config().vocab_size
    same &= model.config.is_encoder_decoder == assistant.config.is_encoder_decoder
    alike = (model.device, model.dtype) == (assistant.device, assistant.dtype)
    if not (same and alike and has_captured_steps(assistant) and positions_of_step(assistant) == 1):
        return None
    source = None
    if model.config.is_encoder_decoder:
        source = arguments.get("inputs", arguments.get(model.main_input_name))
        is_given = isinstance(source, Tensor) and arguments.get("encoder_outputs") is None
        if not is_given or model.main_input_name != assistant.main_input_name:
            return None
    threshold = assistant.generation_config.assistant_confidence_threshold
    if threshold is not None and type(threshold) not in (int, float):
        return None
    return AssistantDraft(assistant, _schedule(assistant, option), threshold or 0.0, source)


def _schedule(assistant: Any, option: Any) -> Schedule | None:
    """What the user has said of how many tokens to draft, in the call or, as the library has it, in the assistant."""
    own = assistant.generation_config
    count = option("num_assistant_tokens") or own.num_assistant_tokens
    name = option("num_assistant_tokens_schedule") or own.num_assistant_tokens_schedule
    return Schedule(count, name or "constant") if type(count) is int and count > 0 else None
