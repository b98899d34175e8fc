"""The requests and answers of OpenAI's paths for recordings, with fields of vLLM's and Transformers'."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fastgen_serve import audio
from fastgen_serve.api.schema import Body, ModelName, Text, off

THRESHOLDS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")


class SpeechRequest(Body):
    """A form. Its values are texts, and those of lists are in fields of the same name, with or without [] behind it."""

    file: Annotated[
        Any, WithJsonSchema({"type": "string", "format": "binary", "description": ", ".join(audio.FORMATS)})
    ]
    model: ModelName = None
    language: Text | None = Field(default=None, description="Of the recording: a code, or its English name.")
    prompt: Text | None = Field(default=None, description="A text that comes before, whose words and style go on.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, strict=False, description="Above 0, tokens are drawn."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None, strict=False, description="vLLM's: of what is drawn."
    )
    timestamp_granularities: list[str] | None = Field(default=None, description='"segment", with verbose_json.')
    compression_ratio_threshold: float | None = Field(
        default=None, strict=False, description="Transformers': what repeats itself more is written again, drawn."
    )
    logprob_threshold: float | None = Field(
        default=None, strict=False, description="Transformers': so is what is less likely than this."
    )
    no_speech_threshold: float | None = Field(
        default=None, strict=False, description="Transformers': with logprob_threshold, silence is left out."
    )
    chunking_strategy: Any = off("auto")
    include: Any = off()
    keywords: Any = off()
    known_speaker_names: Any = off()
    known_speaker_references: Any = off()
    languages: Any = off()
    stream: Any = off("false")

    @field_validator("timestamp_granularities", mode="before")
    @classmethod
    def _of_segments(cls, value: Any) -> Any:
        given = [value] if isinstance(value, str) else value
        if given not in (None, ["segment"]):
            raise PydanticCustomError("granularity", "is of words, or unknown: this server has times of segments alone")
        return given

    @model_validator(mode="after")
    def _agrees(self) -> SpeechRequest:
        if self.timestamp_granularities is not None and self.response_format != "verbose_json":
            raise PydanticCustomError("granularity", "timestamp_granularities are those of verbose_json: ask for that")
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise PydanticCustomError("threshold", "no_speech_threshold needs logprob_threshold: give both")
        return self

    @property
    def needs_segments(self) -> bool:
        return self.response_format in ("srt", "vtt", "verbose_json")

    @property
    def thresholds(self) -> dict[str, float]:
        return {name: value for name in THRESHOLDS if (value := getattr(self, name)) is not None}


class AudioUsage(BaseModel):
    type: Literal["duration"]
    seconds: int = Field(description="Of the recording, rounded up.")


class Transcription(BaseModel):
    text: str
    usage: AudioUsage


class TranscriptionSegment(BaseModel):
    id: int
    start: float = Field(description="In seconds.")
    end: float
    text: str
    tokens: list[int]


class VerboseTranscription(BaseModel):
    task: Literal["transcribe", "translate"]
    language: str = Field(description="The English name of the one that is spoken, or of a translation.")
    duration: float = Field(description="Of the recording, in seconds.")
    text: str
    segments: list[TranscriptionSegment]
    usage: AudioUsage
