"""Makes a request from the arguments of `generate`: checks them, and finds its lengths and what may share its batch."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from fastgen.engine import models
from fastgen.engine.requests import Request, inputs_of, is_form, is_of_the_engine, row_of, with_own_forms

# Arguments of `generate` that are not part of a generation config.
_OF_THE_LOOP = ("assistant_model", "streamer", "tokenizer", "assistant_tokenizer")
_ARGUMENTS = {*inspect.signature(GenerationMixin.generate).parameters, *_OF_THE_LOOP, "trust_remote_code"}
# Methods of the library that check option values, for models that do not override them.
_LOOK_AT_VALUES = ("_prepare_special_tokens", "_get_logits_processor")
# Arguments with which a request may still share a prefill.
_HARMLESS = frozenset({"generation_config", "synced_gpus", "tokenizer", "trust_remote_code", "streamer"})
_TOKENS = frozenset({"inputs", "input_ids", "attention_mask"})

# Options that a batch may have if all of its requests agree in them: they affect each row independently.
_SHARED = (
    "num_beams num_return_sequences early_stopping length_penalty use_cache renormalize_logits remove_invalid_values "
    "pad_token_id bos_token_id eos_token_id decoder_start_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty".split()
)
# The same, if no row has padding: these read the encoder's tokens, or the prompt's if there is no encoder.
_READ_SOURCE = "encoder_repetition_penalty encoder_no_repeat_ngram_size".split()
_READ_PROMPT = "repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias forced_bos_token_id".split()
# A batch gets values of its own for these, derived from the most and the fewest new tokens of its requests, in which
# they agree.
_LENGTHS = "max_length max_new_tokens min_length min_new_tokens".split()
# Options of sampling.
_DRAWN = "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split()
# Options without effect if nothing is drafted and only tokens are returned.
_IDLE = (
    "do_sample max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind disable_compile compile_config".split()
)
# Options that return more than sequences. Slots return them for each request; a static batch cannot.
_RETURNED = ("return_dict_in_generate", "output_scores", "output_logits")
_NO_OPTIONS = ("transformers_version", "_from_model_config")
_KNOWN = frozenset((*_SHARED, *_READ_SOURCE, *_READ_PROMPT, *_LENGTHS, *_DRAWN, *_IDLE, *_RETURNED))
# Values other than false ones that switch an option off.
_OFF = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "num_beam_groups": 1}

# Integer options that planning needs; the library also accepts them as NumPy numbers or tensors.
_WHOLE = "num_beams num_return_sequences max_new_tokens max_length".split()
# Seeds that torch accepts.
_SEEDS = range(-(2**63), 2**64)

# Options with which Whisper's own `generate` changes the model.
_CHANGE_MODEL = ("return_token_timestamps", "assistant_model")


def make(
    model: Any, inputs: Any, generation_config: Any, options: Mapping[str, Any], seed: int | None, most_rows: int
) -> Request:
    """Makes a request from the arguments of `Engine.submit`, for a batch of at most `most_rows` rows.

    Raises:
        ValueError: `generate` would refuse it, or it does not fit.
    """
    given, outer, model = inputs_of(model, inputs), model, models.model_inside(model)
    given = models.name_tokens(outer, model, given)
    twice = sorted(given.keys() & options.keys())
    if twice:
        raise ValueError(f"among the inputs and as an option: {', '.join(twice)}")
    if generation_config is not None:
        options = {**options, "generation_config": generation_config}
    options = _own(options)
    made = Request(given, options, _index("seed", seed, _SEEDS))
    made.alone, own = models.alone_for_adapters(outer), models.why_by_itself(model)
    if own is not None:
        made.has_inner_requests = made.alone is None and _has_inner_requests(outer, model, options, made.seed)
        made.alone = own
    if made.alone is not None:  # its own `generate` may take any options
        return made
    _check(made, outer, model, most_rows)
    return made


def make_inner(model: Any, arguments: Mapping[str, Any], most_rows: int, seed: int | None = None) -> Request | None:
    """Makes the request that stands for a call of the library's `generate` by a model's own; None if none can.

    Args:
        arguments: arguments of the call, by name.
    """
    inputs = {name: value for name, value in arguments.items() if _is_input(name, value)}
    others = {name: value for name, value in arguments.items() if name not in inputs}
    others = {name: value for name, value in others.items() if value is not None or name not in _ARGUMENTS}
    if not inputs or any(len(_first(value)) != 1 for value in inputs.values()):
        return None
    made = Request(inputs, _own(others), seed, generate=partial(GenerationMixin.generate, model))
    try:
        _check(made, model, model, most_rows)
    except ValueError:  # the call itself raises it, or has no room
        return None
    return made


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copies options for a request: the caller may change the config later, or use the forms for other requests."""
    made = dict(options)
    if made.get("generation_config") is not None:
        made["generation_config"] = copy.deepcopy(made["generation_config"])
    if made.get("logits_processor") is not None:
        made["logits_processor"] = with_own_forms(made["logits_processor"])
    return made


def _is_input(name: str, value: Any) -> bool:
    is_argument = name in _ARGUMENTS and name != "inputs"
    # The library also accepts a number as a tensor without axes: that is an option.
    return isinstance(value, (Tensor, ModelOutput)) and not (is_argument or _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _first(value: Any) -> Any:
    return value if isinstance(value, Tensor) else value[0]


def _check(made: Request, outer: Any, model: Any, most_rows: int) -> None:
    """Checks what a request asks for, and sets what may share its batch. ValueError: `generate` would refuse it."""
    given, options = made.inputs, made.options
    models.choose_config(outer, model)
    made.adapter = models.take_adapter(outer, model, options)
    of_peft = models.arguments_of(outer, options)
    of_model = {name: value for name, value in options.items() if name not in of_peft}
    made.config, others, has_default_length = _checked(model, given, of_model)
    made.rows = max(made.config.num_beams or 1, made.config.num_return_sequences or 1)
    if made.rows > most_rows:
        raise ValueError(f"num_beams, num_return_sequences: {made.rows} rows, the engine has {most_rows}")
    if options.get("streamer") is not None and made.rows > 1:
        raise ValueError("a streamer takes one sequence: num_beams and num_return_sequences must be 1")
    made.tokens, made.mask = row_of(given, "input_ids", "inputs"), row_of(given, "attention_mask")
    names, has_encoder = (*given, *others), bool(model.config.is_encoder_decoder)
    made.has_other_inputs = not _TOKENS.issuperset(names)
    made.prompt, made.new_tokens = _lengths(model, made, names, has_default_length)
    apart = _apart(made, (*names, *of_peft), has_encoder)
    made.is_static, made.alone = bool(of_peft), apart or _alone(made)
    made.group, made.prefill_group = _groups(made, has_encoder)
    if apart is not None:
        made.prefill_group = None


def _checked(model: Any, given: dict[str, Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """Returns the generation config that the options yield, the model's inputs among them, and whether nobody has set a
    maximum length. Raises ValueError if `generate` would refuse the options.
    """
    config, custom = options.get("generation_config"), options.get("custom_generate")
    # A custom loop may have arguments of its own.
    of_custom = inspect.signature(custom).parameters if callable(custom) else ()
    left = {name: value for name, value in options.items() if name not in _ARGUMENTS and name not in of_custom}
    try:
        made, others = model._prepare_generation_config(config, **left)
        model._validate_model_kwargs({**others, **{name: x for name, x in given.items() if name != "inputs"}})
        _make_whole(made)
        mode = made.get_generation_mode(options.get("assistant_model"))
        of_loop = {name: options[name] for name in _OF_THE_LOOP if options.get(name) is not None}
        model._validate_generation_mode(mode, made, of_loop)
        if hasattr(model, "_get_deprecated_gen_repo"):
            model._get_deprecated_gen_repo(mode, options.get("trust_remote_code"), custom)
        if made.stop_strings is not None and options.get("tokenizer") is None:
            raise ValueError("stop_strings need the tokenizer: give it as an option")
        is_plain = all(
            models.is_the_librarys(type(model), name) and name not in vars(model) for name in _LOOK_AT_VALUES
        )
        if custom is None and is_plain:
            tried, one = copy.copy(made), torch.ones(1, 1, dtype=torch.long)
            tried.watermarking_config = None  # it would make a table of a million numbers
            model._prepare_special_tokens(tried, kwargs_has_attention_mask=True, device=one.device)
            model._get_logits_processor(
                tried, input_ids_seq_length=1, encoder_input_ids=one, device=one.device, model_kwargs={}
            )
    except ValueError:
        raise
    except Exception as error:  # processors do not check all of their arguments
        raise ValueError(f"generate refuses the options: {type(error).__name__}: {error}") from error
    lengths = (left.get("max_length"), getattr(config, "max_length", None), model.generation_config.max_length)
    return made, others, all(length is None for length in lengths)


def _make_whole(config: Any) -> None:
    """Converts the options that planning needs to integers. Raises ValueError if one is not a valid number."""
    for name in _WHOLE:
        setattr(config, name, _index(name, getattr(config, name)))
    if config.num_beams is not None and config.num_beams < 1:
        raise ValueError(f"num_beams is {config.num_beams}: give a positive number")


def _index(name: str, value: Any, of: range | None = None) -> int | None:
    """Returns a value as an integer, or None. Raises ValueError if it is not one, or is outside the range `of`."""
    with contextlib.suppress(TypeError):
        made = None if value is None else operator.index(value)
        if made is None or of is None or made in of:
            return made
    raise ValueError(f"{name} is {value!r}: give a whole number{'' if of is None else ' of 64 bits'}")


def _lengths(model: Any, request: Request, names: Iterable[str], has_default_length: bool) -> tuple[int, int | None]:
    """Returns the tokens that the result begins with, and the limit of new ones. Raises ValueError if it is not valid.

    Returns (0, None) if they are unknown: the input is not tokens, or the decoder starts with more than one token.
    """
    config, prompt = request.config, None if request.tokens is None else request.length
    if model.config.is_encoder_decoder:
        source = models.positions_of(model.config, of_source=True)
        if source is not None and request.length > source:
            raise ValueError(f"the input has {request.length} tokens, the model {source} positions")
        prompt = None if any(name.startswith("decoder_input") for name in names) else 1
    if prompt is None:
        return 0, None
    new_tokens = config.max_new_tokens
    if new_tokens is None and has_default_length:  # as in `GenerationMixin._prepare_generated_length`
        longest = getattr(model.config, "max_position_embeddings", None)
        new_tokens = config.max_length if longest is None else min(config.max_length, longest - prompt)
    elif new_tokens is None:
        new_tokens = config.max_length - prompt
    if new_tokens < 1:
        raise ValueError(
            f"no room for new tokens: a prompt of {prompt}, max_new_tokens {config.max_new_tokens}, "
            f"max_length {config.max_length}"
        )
    positions = models.positions_of(model.config)
    if positions is not None and prompt + new_tokens - 1 > positions:  # the model does not read the last token
        raise ValueError(
            f"{prompt} tokens and {new_tokens} new ones (max_new_tokens): the model has {positions} positions"
        )
    return prompt, new_tokens


def _alone(request: Request) -> str | None:
    """Returns why a request must not share a static batch, although it may share a prefill; None if it may."""
    if request.config.do_sample or request.seed is not None:
        return "sampling"
    if is_form(request.options.get("logits_processor")):
        return "a form of its own"
    return None if request.options.get("streamer") is None else "the argument streamer"


def _apart(request: Request, names: Iterable[str], has_encoder: bool) -> str | None:
    """Returns why a request must not share a prefill; None if it may. A whitelist decides."""
    tokens, mask, config = request.tokens, request.mask, request.config
    if tokens is None:
        return "inputs other than tokens"
    for name in names:
        if name not in _TOKENS:
            return f"the model's input {name}"
    if "attention_mask" in request.inputs and (mask is None or mask.shape != tokens.shape):
        return "an attention mask of another shape"
    if mask is None and not has_encoder and _infers_mask(config, request.token_list):
        return "padding without an attention mask"
    for name, value in request.options.items():
        if name in _ARGUMENTS and name not in _HARMLESS and value is not None and not is_of_the_engine(name, value):
            return f"the argument {name}"
    for name, value in options_of(config).items():
        if name not in _KNOWN and _is_on(name, value):
            return f"the option {name}"
    return None


def _infers_mask(config: Any, tokens: list[int]) -> bool:
    """Whether the library masks padding tokens of a prompt that has no mask. It does not if the padding token also ends
    a sequence: each turn of a chat may end with one (`GenerationMixin._prepare_attention_mask_for_generation`).
    """
    ends = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
    return config.pad_token_id in tokens and config.pad_token_id not in ends


def _groups(request: Request, has_encoder: bool) -> tuple[Hashable, Hashable]:
    """Returns two keys: requests with an equal first key may share a batch; with an equal second key, they may be
    prefilled together and then continue separately. The second is None for a request that must be prefilled alone.
    """
    own, of_prompt = options_of(request.config), () if has_encoder else _READ_PROMPT

    def has(names: Iterable[str]) -> bool:
        return any(_is_on(name, own.get(name)) for name in names)

    shared = tuple((name, _exact(own.get(name))) for name in (*_SHARED, *_READ_SOURCE, *_READ_PROMPT))
    least = least_new_tokens(request.config, request.prompt)
    length = request.length if has((*_READ_SOURCE, *of_prompt)) else None
    alone = object() if request.alone is not None or request.config.return_dict_in_generate else None
    group = shared, request.new_tokens, least, length, alone, request.adapter
    if has((*_READ_SOURCE, "exponential_decay_length_penalty")):
        return group, None  # the latter counts from the end of the prompt
    returned = tuple(bool(own.get(name)) for name in _RETURNED)
    drawn = tuple((name, _exact(own.get(name))) for name in _DRAWN) if request.config.do_sample else None
    criteria = len(request.options.get("stopping_criteria") or ())
    has_form = request.options.get("logits_processor") is not None
    return group, (shared, drawn, least, length, returned, criteria, has_form, request.adapter)


def _exact(value: Any) -> str:
    """Returns a string that is equal for equal values only: printed tensors and arrays omit digits and elements."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return f"{value.dtype} {value.tolist()!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_exact, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_exact(key)}: {_exact(each)}' for key, each in value.items())}}}"
    return repr(value)


def options_of(config: Any) -> dict[str, Any]:
    """Returns the options of a generation config, by name."""
    return {name: value for name, value in config.to_dict().items() if name not in _NO_OPTIONS}


def least_new_tokens(config: Any, prompt: int) -> int:
    """Returns the fewest tokens that a generation config allows after a prompt."""
    if config.min_new_tokens is not None:
        return int(config.min_new_tokens)
    return max((config.min_length or 0) - prompt, 0)


def _is_on(name: str, value: Any) -> bool:
    return bool(value) and value != _OFF.get(name)


def _has_inner_requests(outer: Any, model: Any, options: Mapping[str, Any], seed: int | None) -> bool:
    """Whether calls of the library's `generate` by the model's own may run in slots."""
    changes_model = any(options.get(name) for name in _CHANGE_MODEL)
    # A seed covers all windows of a recording, whose calls draw one after the other.
    has_one_seed = seed is None or type(model).__name__ != "WhisperForConditionalGeneration"
    is_served = has_one_seed and not (changes_model or models.arguments_of(outer, options))
    return is_served and models.asks_library(model)
