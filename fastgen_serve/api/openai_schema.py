"""The requests of OpenAI's interface, with vLLM's additional fields, and Transformers' if vLLM has none.

A declared field is either implemented, or refused unless its value asks for nothing (`off`). Unknown fields are
refused.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fastgen_serve.api import tools_schema
from fastgen_serve.api.forms_schema import ResponseFormat, StructuredOutputs
from fastgen_serve.api.messages_schema import Message, Templating
from fastgen_serve.api.schema import Body, Inputs, ModelName, Text, TokenId, Unused, described, off
from fastgen_serve.api.tools_schema import ChosenTool, Tool
from fastgen_serve.errors import BadRequest

_STOPS, _STOP_LENGTH = 16, 256
MOST_LOGPROBS = 20
Probability = Annotated[float, Field(gt=0, le=1)]
# Beyond this range probabilities underflow float32.
Penalty = Annotated[float, Field(ge=0.01, le=100)]
# Lower values mean greedy search, as in vLLM. Some clients send such a value for 0.
_LEAST_TEMPERATURE = 1e-5
CountPenalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
# The library allocates a list for each position of an n-gram. No sequence has more tokens.
_LONGEST_NGRAM = 4096
Ngram = Annotated[int, Field(ge=0, le=_LONGEST_NGRAM)]
Stop = Annotated[Text, Field(min_length=1, max_length=_STOP_LENGTH)]


class StreamOptions(Body):
    include_usage: bool | None = Field(default=None, description="A last chunk without choices has the usage.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="So has each chunk that of its choice until then; with include_usage."
    )
    include_obfuscation: Any = off(False)


class Cutting(Body):
    """Options of tokenisation."""

    add_special_tokens: bool = Field(default=True, description="Special tokens, such as BOS, are added to texts.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None,
        description="Tokens that the input is cut to; -1 for as many as the model reads.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None,
        description="'left' cuts the beginning off, which is the default of decoder-only models, 'right' the end.",
    )

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("zero", "is 0: give a number of tokens, or -1 for as many as the model reads")
        return value

    @property
    def special(self) -> bool:
        """Whether special tokens are added; always if the request cannot set it."""
        return self.add_special_tokens is not False


class Generation(Cutting):
    """The common fields of completions, chat completions and responses."""

    prefix: ClassVar[str]
    """Prefix of the answers' ids."""

    model: ModelName = None
    stream: bool | None = Field(
        default=None, description="Answers with server-sent events, while tokens become certain."
    )
    stream_options: StreamOptions | None = None
    user: Unused = None

    n: Count | None = Field(default=None, description="Results of an input. With beams, the n best.")
    best_of: Count | None = Field(
        default=None,
        description="Of so many drawn results the n with the best mean log-probability; with beams, the width.",
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(default=None, description="Of what is drawn.")
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=_STOPS, fail_fast=True)] | None,
        described(f"is no text of 1 to {_STOP_LENGTH} characters, and no list of up to {_STOPS} such texts"),
    ] = Field(default=None, description="Strings that end a result.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None, description="0 is greedy search, and so is less than 0.00001; more is sampling."
    )
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="0 and -1 switch it off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    do_sample: bool | None = None
    use_beam_search: bool = Field(
        False, description="Beam search; n is the number of beams, unless num_beams says another."
    )
    num_beams: Count | None = None
    num_return_sequences: Count | None = Field(default=None, description="The same as n.")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(default=None, description="Of beams.")
    early_stopping: Annotated[bool | Literal["never"] | None, described("is not true, false or 'never'")] = Field(
        default=None, description="Of beams."
    )
    repetition_penalty: Penalty | None = None
    frequency_penalty: CountPenalty | None = Field(
        default=None, description="Taken from the score of a token for each time that the result has it."
    )
    presence_penalty: CountPenalty | None = Field(default=None, description="The same, once if the result has it.")
    no_repeat_ngram_size: Ngram | None = None
    encoder_repetition_penalty: Penalty | None = None
    encoder_no_repeat_ngram_size: Ngram | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, description="By token id."
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(default=None, description="New tokens, at the least.")
    ignore_eos: bool = Field(default=False, description="A result goes on behind EOS, up to max_tokens.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        default=None, description="Tokens that end a result, besides EOS."
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = Field(default=None, description="Adds token_ids and prompt_token_ids.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Tokens of logprobs are written as 'token_id:7'."
    )
    src_lang: Text | None = Field(
        default=None, description="Language of the source, as the model's tokenizer calls it."
    )
    tgt_lang: Text | None = Field(
        default=None, description="Language of the result, as the model's tokenizer calls it."
    )

    response_format: ResponseFormat | None = Field(default=None, description="JSON, of any schema or of this one.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="The form of a result.")

    echo: Any = off(False)
    spaces_between_special_tokens: Any = off(True)
    allowed_token_ids: Any = off([])
    bad_words: Any = off([])
    prompt_logprobs: Any = off()
    logits_processors: Any = off([])
    priority: Any = off(0)
    cache_salt: Any = off()
    kv_transfer_params: Any = off()
    vllm_xargs: Any = off({})

    @field_validator("temperature")
    @classmethod
    def _draws_or_not(cls, value: float | None) -> float | None:
        return 0 if value is not None and value < _LEAST_TEMPERATURE else value

    @field_validator("logit_bias")
    @classmethod
    def _by_token(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next((key for key in value or () if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
        if wrong is not None:
            raise PydanticCustomError("token_id", "has the key {key}, which is no token id", {"key": repr(wrong[:20])})
        return value

    @model_validator(mode="after")
    def _streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options: give them with stream=true only", param="stream_options")
        if self.stream and self.best_of is not None and not self.has_beams and self.best_of != (self.n or 1):
            raise BadRequest("best_of: which results are best is known at the end, leave stream out", param="best_of")
        return self

    @model_validator(mode="after")
    def _has_one_form(self) -> Generation:
        if None not in (self.response_format, self.structured_outputs):
            raise BadRequest("structured_outputs: give it or response_format", param="structured_outputs")
        if self.form is not None and self.min_tokens:
            raise BadRequest("min_tokens: leave it out where the result has a form, which ends it", param="min_tokens")
        return self

    @cached_property
    def form(self) -> dict[str, Any] | None:
        """Keywords of `fastgen.Grammar` that constrain each result; None for no constraint."""
        return self._form()

    def _form(self) -> dict[str, Any] | None:
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.form

    @property
    def limit(self) -> int | None:
        """The limit of new tokens."""
        raise NotImplementedError

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of likeliest tokens to return per position, besides the new one; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    @property
    def has_beams(self) -> bool:
        return self.use_beam_search or self.num_beams is not None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def sends_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def sends_usage_always(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.sends_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Generation):
    """A prompt, or several, that the model continues; or sources that an encoder-decoder model turns into targets."""

    prefix: ClassVar[str] = "cmpl-"
    prompt: Inputs = Field(description="A text, texts, token ids, or lists of token ids.")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="New tokens, at the most: 16 for decoder-only models. 0 with echo=true only."
    )
    echo: bool | None = Field(
        default=None,
        description="The text begins with the prompt, and logprobs with those of its tokens; decoder-only models.",
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        default=None,
        description="Log-probabilities of the new tokens, and of so many of the likeliest at each position.",
    )

    suffix: Any = off("")
    prompt_embeds: Any = off([])

    @model_validator(mode="after")
    def _echoes(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens is 0: give 1 or more, or echo=true with it", param="max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            raise BadRequest("echo: the log-probabilities of a prompt are not streamed, leave stream out", param="echo")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class Conversation(Templating, Generation):
    """The common fields of chat completions and responses."""

    add_special_tokens: bool = Field(
        default=False, description="Special tokens are added to what the chat template writes."
    )
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None

    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | ChosenTool,
            described("is not 'none', 'auto' or 'required', and names no function"),
        ]
        | None
    ) = Field(
        default=None, description="auto, where there are tools: the model decides. Or that it calls one, or this one."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call, where one must be.")
    service_tier: Any = off("auto", "default")
    store: Any = off(False)

    @model_validator(mode="after")
    def _tools_agree(self) -> Conversation:
        if self.must_call and not self.tools:
            raise BadRequest("tool_choice: give tools with it", param="tool_choice")
        names = {each.function.name for each in self.tools or ()}
        if isinstance(self.tool_choice, ChosenTool) and self.chosen_name not in names:
            raise BadRequest(f"tool_choice: there is no tool {self.chosen_name}", param="tool_choice")
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else super().usable_tools

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    @property
    def chosen_name(self) -> str | None:
        """The function that the answer must call; None for any."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None

    def _form(self) -> dict[str, Any] | None:
        """Returns the form of calls if there must be one: a form of text is for answers without calls."""
        if not self.must_call:
            return super()._form()
        functions = [each.function for each in self.usable_tools]
        chosen = next((each for each in functions if each.name == self.chosen_name), None)
        if chosen is not None:
            return {"json_schema": tools_schema.form_of_arguments(chosen)}
        most = 1 if self.parallel_tool_calls is False else None
        return {"json_schema": tools_schema.form_of_calls(functions, most)}


class ChatRequest(Conversation):
    """A conversation that the model answers."""

    prefix: ClassVar[str] = "chatcmpl-"
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = Field(
        default=None, description="New tokens, at the most; without it, as many as fit."
    )
    max_tokens: Count | None = Field(default=None, description="The same, by its old name.")
    logprobs: bool | None = Field(default=None, description="Log-probabilities of the new tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        default=None,
        description="Log-probabilities of so many of the likeliest tokens at each position; with logprobs=true.",
    )

    functions: Any = off([])
    function_call: Any = off("none", "auto")
    modalities: Any = off(["text"])
    audio: Any = off()
    prediction: Any = off()
    reasoning_effort: Any = off("none")
    include_reasoning: Any = off(True)
    mm_processor_kwargs: Any = off({})
    verbosity: Any = off("medium")
    metadata: Any = off({})
    moderation: Any = off()
    prompt_cache_options: Any = off()
    prompt_cache_retention: Any = off()
    web_search_options: Any = off()

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs: give logprobs=true with it", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BadRequest("max_tokens: it differs from max_completion_tokens, give one of them", param="max_tokens")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingRequest(Cutting):
    """Texts to turn into vectors."""

    input: Inputs = Field(description="A text, texts, token ids, or lists of token ids.")
    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: float32, little-endian."
    )
    prompt_name: Text | None = Field(
        default=None,
        description="Of the model's prompts, as sentence-transformers calls them: it is put before each text.",
    )
    dimensions: Count | None = Field(
        default=None,
        description="The vector is cut to its first numbers, and gets the length 1: for models trained for that.",
    )
    embed_dtype: Any = off("float32")
    endianness: Any = off("native", "little")
    user: Unused = None
