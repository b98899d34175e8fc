"""What the server asks the process of a model for, and what that answers: plain data, as it crosses a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Tokens of an input to a model that has no limit of its own: memory has one.
MOST_TOKENS = 4096


@dataclass(frozen=True)
class Generate:
    """A request to generate.

    Attributes:
        tokens: ids of the prompt, or of the source of an encoder-decoder model.
        options: keywords of `generate`, of plain values: max_new_tokens, num_beams, do_sample, ...
        seed: of what is drawn; None for one that is drawn, too.
        stop: texts that end a sequence (`stop_strings`).
        logprobs: the log-probability of each new token is wanted, and those of so many others at its position.
        prompt_logprobs: the same of the tokens of the prompt, for decoder-only models.
        inputs: what the model reads besides, such as pixels: arrays, by their names.
        streams: new tokens are wanted as they are certain.
        penalties: taken from the score of a token for each time that it has been generated, and once if it has.
        form: that each result has: keywords of `fastgen.Grammar`; None for any.
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
        """Of what the model reads besides the tokens."""
        return bytes_of(self.inputs)


@dataclass(frozen=True)
class Transcribe:
    """A request to write down what a recording says.

    Attributes:
        inputs: what the model reads, as its feature extractor makes it: arrays of one row, by their names.
        seconds: of the recording.
        options: keywords of `generate`, of plain values: language, task, temperature, ...
        tokens: ids of a text that comes before.
        seed: of what is drawn; None for one that is drawn, too.
        segments: these are wanted, and the language.
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
    """Of arrays, by their names."""
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
        finish_reason: "stop" behind EOS or a stop string, "length" at the limit.
        score: `sequences_scores` of beam search; None without beams.
        logprobs: of each token, where they were asked for.
        generated: number of new tokens, EOS among them: for `usage`.
        ended_by: EOS, which is not among the tokens, or another token that ends it; None for a text, or the limit.
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
        """New tokens of each."""
        return [sequence.generated for sequence in self.sequences]


@dataclass(frozen=True)
class Segment:
    """A part of a recording: from when to when, in seconds, and its tokens."""

    start: float
    end: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcribed:
    """What a recording says.

    Attributes:
        tokens: of all of it.
        segments: where they were asked for.
        language: code of the one that the model was told, or has heard; None where it says none.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    language: str | None = None

    @property
    def lengths(self) -> list[int]:
        """New tokens."""
        return [len(self.tokens)]


@dataclass(frozen=True)
class Encoded:
    """What comes of an `Encode`.

    Attributes:
        values: the vector, or the scores of all labels.
        seconds: of its batch, shared among all that were in it.
    """

    values: list[float]
    seconds: float


@dataclass(frozen=True)
class Delta:
    """New tokens of a stream.

    Attributes:
        index: of the sequence. With beams, 0: what all beams share is certain, and is of the best one.
    """

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Encode:
    """A text to encode, or a pair of texts.

    Attributes:
        tokens: ids, with the special ones.
        what: "vector", or "labels".
        token_type_ids: of a pair, where the model has them.
    """

    tokens: tuple[int, ...]
    what: str = "vector"
    token_type_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Speech:
    """What a model that transcribes can be asked for.

    Attributes:
        languages: codes of those that it can be told.
        is_english: it knows English alone.
        translates: it writes English for other languages, too.
        has_windows: it goes through recordings of any length, and says when what is spoken.
        prompt: tokens that it reads of a text that comes before, at the most.
    """

    languages: tuple[str, ...] = ()
    is_english: bool = False
    translates: bool = False
    has_windows: bool = False
    prompt: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """What a model is.

    Attributes:
        name: under which it is served.
        kind: "decoder-only", "encoder-decoder" or "encoder".
        tasks: of "generate", "transcribe", "vector", "labels".
        positions: tokens that an input may have at the most; None for any number.
        max_new_tokens: if a request says nothing.
        labels: of a classifier, by index.
        vector_size: of an encoder.
        slots: rows of a decode step.
        defaults: options that the files of the model set for `generate`: num_beams, do_sample, eos_token_id, ...
        prompt: text that is put before every text to encode, unless the request names another one of `prompts`.
        prompts: those that come with the model, by name.
        lower_case: texts to encode are turned to lower case first, and so are prompts that a request names.
        scores: what makes scores of a classifier's numbers: "softmax", "sigmoid", or "raw" for these as they are.
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
