"""The jobs that the server sends to a model's process, and their results: plain data, because they cross a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The limit of tokens for an input to a model without a limit of its own: memory is finite.
MOST_TOKENS = 4096


@dataclass(frozen=True)
class Generate:
    """A request to generate.

    Attributes:
        tokens: ids of the prompt, or of the source of an encoder-decoder model.
        options: keywords of `generate`, with plain values: max_new_tokens, num_beams, do_sample, ...
        seed: the seed of sampling; None to draw one.
        stop: strings that end a sequence (`stop_strings`).
        logprobs: number of likeliest tokens to return per position, besides the new token's log-probability; None for
            no log-probabilities.
        prompt_logprobs: the same number for each token of the prompt; for decoder-only models.
        inputs: other inputs of the model, such as pixels: arrays, by name.
        streams: whether to return new tokens as soon as they are final.
        penalties: subtracted from the score of a token: for each time that it has been generated (frequency), and once
            if it has been (presence).
        form: keywords of `fastgen.Grammar` that constrain each result; None for no constraint.
    """

    tokens: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    streams: bool = False
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    form: Mapping[str, Any] | None = None
    penalties: tuple[float, float] = (0.0, 0.0)
    prompt_logprobs: int | None = None

    @property
    def input_bytes(self) -> int:
        """Size in bytes of the inputs other than tokens."""
        return bytes_of(self.inputs)


@dataclass(frozen=True)
class Transcribe:
    """A request to transcribe or translate a recording.

    Attributes:
        inputs: the feature extractor's output: arrays of one row, by name.
        seconds: length of the recording.
        options: keywords of `generate`, with plain values: language, task, temperature, ...
        tokens: ids of a text that precedes the recording.
        seed: the seed of sampling; None to draw one.
        segments: whether to return the segments and the language.
    """

    inputs: Mapping[str, Any] = field(repr=False, compare=False)
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    seed: int | None = None
    segments: bool = False

    @property
    def input_bytes(self) -> int:
        return bytes_of(self.inputs)


def bytes_of(inputs: Mapping[str, Any]) -> int:
    """Returns the size in bytes of arrays by name."""
    return sum(getattr(value, "nbytes", 0) for value in inputs.values())


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sequence:
    """One result.

    Attributes:
        tokens: the new ones, without the prompt, the decoder's start, EOS and padding.
        finish_reason: "stop" after EOS or a stop string, "length" at the limit.
        score: `sequences_scores` of beam search; None without beams.
        logprobs: of each token, if the request asked for them.
        generated: number of new tokens, EOS among them: for `usage`.
        ended_by: the token that ended the sequence: EOS, which is not in `tokens`, or a stop token; None if a stop
            string or the limit ended it.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    score: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    generated: int = 0
    ended_by: int | None = None


@dataclass(frozen=True)
class Generated:
    """The results of a request, best first.

    Attributes:
        prompt_logprobs: of each token of the prompt but the first, where they were asked for.
    """

    sequences: tuple[Sequence, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def lengths(self) -> list[int]:
        """Numbers of new tokens of the sequences."""
        return [sequence.generated for sequence in self.sequences]


@dataclass(frozen=True)
class Segment:
    """A part of a recording: its start and end in seconds, and its tokens."""

    start: float
    end: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcribed:
    """The transcript of a recording.

    Attributes:
        tokens: of the whole recording.
        segments: if the request asked for them.
        language: code of the language that the request set or the model detected; None if there is none.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    language: str | None = None

    @property
    def lengths(self) -> list[int]:
        """Numbers of new tokens."""
        return [len(self.tokens)]


@dataclass(frozen=True)
class Encoded:
    """The result of an `Encode`.

    Attributes:
        values: the vector, or the scores of all labels.
        seconds: duration of its batch, divided by the number of inputs in it.
    """

    values: list[float]
    seconds: float


@dataclass(frozen=True)
class Delta:
    """New tokens of a stream.

    Attributes:
        index: of the sequence. With beams, 0: the tokens that all beams share are final, and belong to the best one.
    """

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Encode:
    """A text to encode, or a pair of texts.

    Attributes:
        tokens: ids, including special tokens.
        what: "vector", or "labels".
        token_type_ids: of a pair, if the model uses them.
    """

    tokens: tuple[int, ...]
    what: str = "vector"
    token_type_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Speech:
    """The capabilities of a model that transcribes.

    Attributes:
        languages: codes of the languages that a request can set.
        is_english: whether it knows only English.
        translates: whether it can translate other languages to English.
        has_windows: whether it accepts recordings of any length, and returns timestamps.
        prompt: the most tokens that it reads of a preceding text.
    """

    languages: tuple[str, ...] = ()
    is_english: bool = False
    translates: bool = False
    has_windows: bool = False
    prompt: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """The description of a model.

    Attributes:
        name: the name under which it is served.
        kind: "decoder-only", "encoder-decoder" or "encoder".
        tasks: of "generate", "transcribe", "vector", "labels".
        positions: the most tokens of an input; None for no limit.
        max_new_tokens: the default of a request.
        labels: of a classifier, by index.
        vector_size: of an encoder.
        slots: rows of a decode step.
        defaults: options that the model's files set for `generate`: num_beams, do_sample, eos_token_id, ...
        prompt: text that precedes every text to encode, unless the request names another one of `prompts`.
        prompts: the prompts that the model's files define, by name.
        lower_case: whether texts to encode, and prompts that a request names, are lowercased first.
        scores: how a classifier's logits become scores: "softmax", "sigmoid", or "raw" for unchanged logits.
        speech: of a model that transcribes.
    """

    name: str
    kind: str
    tasks: tuple[str, ...]
    positions: int | None
    max_new_tokens: int = 0
    labels: tuple[str, ...] = ()
    vector_size: int = 0
    slots: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    lower_case: bool = False
    scores: str = "raw"
    speech: Speech | None = None
