"""Calls of `generate` that request assisted generation, and which of them FastGen's speculative decoding serves.

Such a call becomes a plain call with a draft, which the decoding loop finds in the state of the call. If the draft
cannot be used after all, the call continues without it and gives the same tokens. Other calls are left to the library.
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
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.models import (
    has_captured_steps,
    positions_of_step,
    takes_more_than_text,
    unsupported,
    why_no_drafts,
)
from fastgen.optimizer.transformers.speculation.drafts import (
    AssistantDraft,
    Draft,
    EarlyExitDraft,
    LookupDraft,
    Schedule,
)

# Options that request assisted generation, as arguments or in the generation config.
_MODELS = ("assistant_early_exit", "assistant_model")
OPTIONS = ("prompt_lookup_num_tokens", *_MODELS)
# Calls with these options are left to the library.
_NOT_SERVED = (
    "assistant_tokenizer", "output_attentions", "output_hidden_states", "dola_layers", "penalty_alpha", "is_assistant",
    *releases.ASSISTANCE, *releases.CACHE_NAMES,
)  # fmt: skip
# Processors that remember the tokens they were called with.
_WITH_STATE = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


class Request:
    """The options of a call of `generate` with these arguments."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self._given, self._own = arguments.get("generation_config"), model.generation_config

    def asked(self, name: str) -> Any:
        """Returns an argument, or the option of this name in the generation config that was passed."""
        value = self.arguments.get(name)
        return value if value is not None else getattr(self._given, name, None)

    def option(self, name: str) -> Any:
        """Returns the same, or else the option in the model's own generation config."""
        value = self.asked(name)
        return value if value is not None else getattr(self._own, name, None)

    @property
    def rows(self) -> int:
        """Number of sequences that are generated."""
        names = ("inputs", "input_ids", self.model.main_input_name, "inputs_embeds", "decoder_input_ids")
        inputs = map(self.arguments.get, names)
        rows = [value.shape[0] for value in inputs if isinstance(value, Tensor) and value.dim()]
        return max(rows, default=1) * (self.asked("num_return_sequences") or self._own.num_return_sequences or 1)

    def runs_users_code(self) -> bool:
        """Whether the call runs user code that could tell the library's drafts from FastGen's.

        Processors see drafted tokens. Criteria and streamers get all accepted tokens of a draft at once. For several
        sequences, for which the library has no drafts, they get the same as without a draft.
        """
        given = self.arguments
        if given.get("prefix_allowed_tokens_fn") or user_code.has_own(given.get("logits_processor") or ()):
            return True
        streamer = given.get("streamer")
        observers = [*(given.get("stopping_criteria") or ()), *([] if streamer is None else [streamer])]
        return user_code.has_own(observers) and self.rows == 1

    def is_served(self) -> bool:
        may_capture = settings.current().captured_step != "never" and has_captured_steps(self.model)
        own = self._own
        return (
            may_capture
            and positions_of_step(self.model) == 1
            and why_no_drafts(self.model) is None
            and self.model.device.type in ("cpu", "cuda")
            and graph.unavailable(self.model.device) is None
            and not any(self.asked(name) for name in _NOT_SERVED)
            and not any(getattr(own, name, None) for name in (*OPTIONS, *_NOT_SERVED))
            and (self.asked("num_beams") or own.num_beams or 1) == 1
            and self.option("use_cache") is not False  # which the library refuses with drafts
            and (self.asked("cache_implementation") or own.cache_implementation or "dynamic") == "dynamic"
        )

    def library_differs(self) -> bool:
        """Whether the library's drafts give other tokens than FastGen's. The library only drafts for one sequence.

        With the same seed, it draws other tokens. If one of its processors keeps a state, rejected tokens affect that.
        Its assistant sees no embeddings, and beside tokens it verifies a draft as if there were none.
        """
        draws = self.option("do_sample") and settings.current().assisted_sampling != "fastgen"
        watermark = self.option("watermarking_config")
        processors = self.arguments.get("logits_processor") or ()
        keeps_state = self.option("guidance_scale") not in (None, 1)
        keeps_state |= isinstance(watermark, SynthIDTextWatermarkingConfig)
        keeps_state |= any(isinstance(each, _WITH_STATE) for each in processors)
        embedded = self.arguments.get("inputs_embeds") is not None and not self.model.config.is_encoder_decoder
        return bool(draws or keeps_state or embedded) and self.rows == 1


def taken_over(model: Any, arguments: dict[str, Any]) -> tuple[Draft | None, dict[str, Any]]:
    """Returns the draft of a call that requests one, and the call's arguments without that request.

    Returns None and the unchanged arguments if the call requests no draft, or is left to the library.
    """
    request = Request(model, arguments)
    asked = [name for name in OPTIONS if request.asked(name) is not None]
    if asked and request.runs_users_code():
        return None, arguments
    if len(asked) != 1 or not request.is_served() or request.library_differs():
        return None, arguments
    draft = _draft(request, asked[0])
    if draft is None:
        return None, arguments
    plain = {name: value for name, value in arguments.items() if name not in OPTIONS}
    if arguments.get("generation_config") is not None:
        plain["generation_config"] = config = copy.copy(arguments["generation_config"])
        for name in OPTIONS:
            if hasattr(config, name):
                setattr(config, name, None)
    return draft, plain


def _draft(request: Request, name: str) -> Draft | None:
    value, model = request.asked(name), request.model
    if name in _MODELS and takes_more_than_text(model):
        return None
    if name == "assistant_model":
        return _assistant(request, value)
    if type(value) is not int or value < 1:
        return None  # the library reports what is wrong with it
    if name == "assistant_early_exit":
        layers = getattr(getattr(model, model.base_model_prefix, None), "config", None)
        count = getattr(layers, "num_hidden_layers", None)
        serves = not model.config.is_encoder_decoder and type(count) is int and value <= count
        return EarlyExitDraft(model, value) if serves else None
    max_ngram = request.asked("max_matching_ngram_size") or model.generation_config.max_matching_ngram_size or 2
    if type(max_ngram) is not int or max_ngram < 1:
        return None
    given = request.arguments
    source = given.get("inputs", given.get("input_ids")) if model.config.is_encoder_decoder else None
    is_tokens = isinstance(source, Tensor) and source.dim() == 2 and source.dtype is torch.int64
    return LookupDraft(value, max_ngram, source if is_tokens else None, model.generation_config.pad_token_id)


def _assistant(request: Request, assistant: Any) -> Draft | None:
    """Returns a draft by another model of the same vocabulary, which has an encoder if the first model has one."""
    model, given = request.model, request.arguments
    if not isinstance(assistant, PreTrainedModel) or assistant is model or unsupported(assistant) is not None:
        return None
    same = model.config.get_text_config().vocab_size == assistant.config.get_text_config().vocab_size
    same &= model.config.is_encoder_decoder == assistant.config.is_encoder_decoder
    alike = (model.device, model.dtype) == (assistant.device, assistant.dtype)
    if not (same and alike and has_captured_steps(assistant) and positions_of_step(assistant) == 1):
        return None
    if why_no_drafts(assistant) is not None:
        return None
    source = None
    if model.config.is_encoder_decoder:
        source = given.get("inputs", given.get(model.main_input_name))
        is_given = isinstance(source, Tensor) and given.get("encoder_outputs") is None
        if not is_given or model.main_input_name != assistant.main_input_name:
            return None
    own = assistant.generation_config
    threshold = own.assistant_confidence_threshold
    if threshold is not None and type(threshold) not in (int, float):
        return None
    # The number of tokens to draft that the user has set, in the call or, as in the library, in the assistant.
    count = request.asked("num_assistant_tokens") or own.num_assistant_tokens
    name = request.asked("num_assistant_tokens_schedule") or own.num_assistant_tokens_schedule
    schedule = Schedule(count, name or "constant") if type(count) is int and count > 0 else None
    return AssistantDraft(assistant, schedule, threshold or 0.0, source)
