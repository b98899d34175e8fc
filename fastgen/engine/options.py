"""What the options of a request come to: what `generate` would refuse, how long it gets, what may share its batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from fastgen.optimizer.transformers import user_code

# Arguments of `generate` that no generation config has.
_OF_THE_LOOP = ("assistant_model", "streamer", "tokenizer", "assistant_tokenizer")
_ARGUMENTS = {*inspect.signature(GenerationMixin.generate).parameters, *_OF_THE_LOOP, "trust_remote_code"}
# Those with which a request may share a batch.
_HARMLESS = frozenset({"generation_config", "synced_gpus", "tokenizer", "trust_remote_code"})
_CRITERIA = "stopping_criteria"
_TOKENS = frozenset({"inputs", "input_ids", "attention_mask"})

# Options that a batch may have if all of its requests agree in them: what they do to a row depends on that row alone.
_SHARED = (
    "num_beams num_return_sequences early_stopping length_penalty use_cache renormalize_logits remove_invalid_values "
    "pad_token_id bos_token_id eos_token_id decoder_start_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty".split()
)
# The same where no row has padding. These look at the encoder's tokens, or at a prompt's where there is no encoder.
_READ_SOURCE = "encoder_repetition_penalty encoder_no_repeat_ngram_size".split()
_READ_PROMPT = "repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias forced_bos_token_id".split()
# Those that count from the end of the prompt.
_OF_ONE_LENGTH = ("exponential_decay_length_penalty",)
# For these a batch has its own values, from the most and the fewest new tokens of its requests, in which they agree.
_LENGTHS = "max_length max_new_tokens min_length min_new_tokens".split()
# Without effect where nothing is drawn, nothing is drafted, and only tokens are returned.
_IDLE = (
    "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff max_matching_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind disable_compile compile_config".split()
)
# What is returned beside the sequences. In slots it is each request's own; a static batch returns sequences alone.
_RETURNED = ("return_dict_in_generate", "output_scores", "output_logits")
_NO_OPTIONS = ("transformers_version", "_from_model_config")
_KNOWN = frozenset((*_SHARED, *_READ_SOURCE, *_READ_PROMPT, *_LENGTHS, *_IDLE, *_RETURNED))
# Values that switch an option off, besides those that are false.
_OFF = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "num_beam_groups": 1}

# What configurations call the positions of a decoder, and of an encoder: the first that there is.
_POSITIONS = ("max_decoder_position_embeddings", "max_target_positions", "max_position_embeddings")
_SOURCE_POSITIONS = ("max_encoder_position_embeddings", "max_position_embeddings")


@dataclass(frozen=True)
class Resolved:
    """The options of a request, with the model's own generation config for what was not given.

    Attributes:
        given: the model's inputs, by name.
        options: the other arguments of `generate`, as given.
        config: the generation config that they come to.
        others: inputs of the model among the options.
        has_default_length: nobody has said how long the result may be.
    """

    model: Any
    given: dict[str, Any]
    options: dict[str, Any]
    config: Any
    others: dict[str, Any]
    has_default_length: bool

    @property
    def rows(self) -> int:
        """Rows that the request takes in a batch."""
        return max(self.config.num_beams or 1, self.config.num_return_sequences or 1)

    @property
    def has_encoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def lengths(self, length: int | None) -> tuple[int, int | None]:
        """Tokens that the result begins with, and the most that come behind, for an input of `length` tokens.

        (0, None) where that is not known: the input is not tokens, or the decoder starts with more than one token.

        Raises:
            ValueError: it is longer than the model, or than `max_length`.
        """
        prompt = length
        if self.has_encoder:
            source = positions_of(self.model.config, of_source=True)
            if length is not None and source is not None and length > source:
                raise ValueError(f"the input has {length} tokens, the model {source} positions")
            starts = any(name.startswith("decoder_input") for name in (*self.given, *self.others))
            prompt = None if starts else 1
        if prompt is None:
            return 0, None
        new_tokens = self._new_tokens(prompt)
        positions = positions_of(self.model.config)
        if new_tokens < 1:
            raise ValueError(
                f"no room for new tokens: a prompt of {prompt}, max_new_tokens {self.config.max_new_tokens}, "
                f"max_length {self.config.max_length}"
            )
        if positions is not None and prompt + new_tokens - 1 > positions:  # the last token is not read
            raise ValueError(
                f"{prompt} tokens and {new_tokens} new ones (max_new_tokens): the model has {positions} positions"
            )
        return prompt, new_tokens

    def _new_tokens(self, prompt: int) -> int:
        """As `GenerationMixin._prepare_generated_length` has it."""
        if self.config.max_new_tokens is not None:
            return self.config.max_new_tokens
        if not self.has_default_length:
            return self.config.max_length - prompt
        positions = getattr(self.model.config, "max_position_embeddings", None)
        total = self.config.max_length + prompt
        return (total if positions is None else min(total, positions)) - prompt

    def alone(self, tokens: Tensor | None, mask: Tensor | None, seed: int | None) -> str | None:
        """Why the request must not share a batch; None where it may. A whitelist decides.

        Args:
            tokens: the input [length], where it is tokens.
            mask: its mask [length], where there is one of zeros and ones.
        """
        if tokens is None:
            return "inputs other than tokens"
        for name in (*self.given, *self.others):
            if name not in _TOKENS:
                return f"the model's input {name}"
        if "attention_mask" in self.given and (mask is None or mask.shape != tokens.shape):
            return "an attention mask of another shape"
        if mask is None and not self.has_encoder and bool((tokens == self.config.pad_token_id).any()):
            return "padding without an attention mask"
        if self.config.do_sample or seed is not None:
            return "sampling"
        for name, value in self.options.items():
            if name in _ARGUMENTS and name not in _HARMLESS and value is not None and not only_release(name, value):
                return f"the argument {name}"
        for name, value in options_of(self.config).items():
            if name not in _KNOWN and _is_on(name, value):
                return f"the option {name}"
        return None

    def group(self, length: int, prompt: int, new_tokens: int | None) -> Hashable:
        """What requests that share a batch agree in."""
        own = options_of(self.config)
        reads = _READ_SOURCE if self.has_encoder else (*_READ_SOURCE, *_READ_PROMPT)
        needs_one_length = any(_is_on(name, own.get(name)) for name in reads)
        length_shared = length if needs_one_length else None
        alone = object() if self.config.return_dict_in_generate else None
        return self._shared, new_tokens, least_new_tokens(self.config, prompt), length_shared, alone

    @property
    def _shared(self) -> tuple[tuple[str, str], ...]:
        own = options_of(self.config)
        return tuple((name, repr(own.get(name))) for name in (*_SHARED, *_READ_SOURCE, *_READ_PROMPT))

    def prefill_group(self, length: int, prompt: int) -> Hashable | None:
        """What requests agree in that are prefilled together, and go on each for itself; None for one alone."""
        own = options_of(self.config)
        if any(_is_on(name, own.get(name)) for name in (*_READ_SOURCE, *_OF_ONE_LENGTH)):
            return None
        least = least_new_tokens(self.config, prompt)
        reads = () if self.has_encoder else _READ_PROMPT
        needs_one_length = any(_is_on(name, own.get(name)) for name in reads)
        returned = tuple(bool(own.get(name)) for name in _RETURNED)
        return (
            self._shared,
            least,
            length if needs_one_length else None,
            returned,
            len(self.options.get(_CRITERIA) or ()),
        )


def options_of(config: Any) -> dict[str, Any]:
    """The options of a generation config, by name."""
    return {name: value for name, value in config.to_dict().items() if name not in _NO_OPTIONS}


def least_new_tokens(config: Any, prompt: int) -> int:
    """The fewest tokens that a generation config lets come behind a prompt."""
    if config.min_new_tokens is not None:
        return int(config.min_new_tokens)
    return max((config.min_length or 0) - prompt, 0)


def only_release(name: str, value: Any) -> bool:
    """Whether an argument of `generate` is criteria that only let go what the call keeps, so that they need not run."""
    return name == _CRITERIA and all(user_code.says(each, "releases_scores") for each in value)


def _is_on(name: str, value: Any) -> bool:
    return bool(value) and value != _OFF.get(name)


def positions_of(config: Any, of_source: bool = False) -> int | None:
    """Tokens that a model generates behind, or, with an encoder, tokens of a source; None for any number.

    Args:
        config: of the model.
        of_source: the number is that of the encoder.
    """
    if not of_source:
        config = config.get_text_config(decoder=True)
    names = _SOURCE_POSITIONS if of_source else _POSITIONS
    return next((found for name in names if isinstance(found := getattr(config, name, None), int)), None)


def has_own_generate(model: Any) -> bool:
    """Whether `generate` of this model, such as Whisper's, is not the library's own for all."""
    return inspect.getattr_static(type(model), "generate", None) is not vars(GenerationMixin)["generate"]


def _check_values(model: Any, config: Any) -> None:
    """Has the library make its processors of the options, as it looks at their values no sooner.

    Raises:
        ValueError: it refuses them.
    """
    for name in ("_prepare_special_tokens", "_get_logits_processor"):
        if name in vars(model) or inspect.getattr_static(type(model), name) is not vars(GenerationMixin)[name]:
            return  # a model's own may want more than this
    made, one = copy.copy(config), torch.ones(1, 1, dtype=torch.long)
    made.watermarking_config = None  # which makes a table of a million numbers
    try:
        model._prepare_special_tokens(made, kwargs_has_attention_mask=True, device=one.device)
        model._get_logits_processor(
            made, input_ids_seq_length=1, encoder_input_ids=one, device=one.device, model_kwargs={}
        )
    except ValueError:
        raise
    except Exception as error:  # of processors that do not check what they are given
        raise ValueError(f"generate refuses the options: {type(error).__name__}: {error}") from error


def resolve(model: Any, given: dict[str, Any], options: dict[str, Any]) -> Resolved | None:
    """What the options come to; None for a model that has a `generate` of its own, which may take any.

    Args:
        given: the model's inputs, as arguments of `generate`.
        options: the other arguments.

    Raises:
        ValueError: `generate` would refuse them.
    """
    if has_own_generate(model):
        return None
    config, custom = options.get("generation_config"), options.get("custom_generate")
    # A loop of the user's may have arguments of its own.
    of_custom = inspect.signature(custom).parameters if callable(custom) else ()
    left = {name: value for name, value in options.items() if name not in _ARGUMENTS and name not in of_custom}
    try:
        made, others = model._prepare_generation_config(config, **left)
        model._validate_model_kwargs({**others, **{name: x for name, x in given.items() if name != "inputs"}})
        mode = made.get_generation_mode(options.get("assistant_model"))
        of_loop = {name: options[name] for name in _OF_THE_LOOP if options.get(name) is not None}
        model._validate_generation_mode(mode, made, of_loop)
        if custom is None:
            _check_values(model, made)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"generate refuses the options: {error}") from error
    lengths = (left.get("max_length"), getattr(config, "max_length", None), model.generation_config.max_length)
    return Resolved(model, given, options, made, others, all(length is None for length in lengths))
