"""The requests and answers of vLLM's additional paths."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from fastgen_serve.api.messages_schema import Message, Templating
from fastgen_serve.api.openai_answers import EmbeddingUsage
from fastgen_serve.api.openai_schema import Cutting
from fastgen_serve.api.schema import Body, Inputs, ModelName, Text, Texts, TokenId, Unused, described, off
from fastgen_serve.errors import BadRequest

Listed = Annotated[Texts, described("is no text, and no list of texts with one at the least")]
Activation = Annotated[
    bool | None,
    Field(description="false: the number of the model as it is, where it has one label. Without it, a probability."),
]
# The alternative names of a pair's two sides.
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class ClassifyRequest(Cutting):
    """Texts to classify."""

    input: Inputs = Field(description="A text, texts, token ids, or lists of token ids.")
    model: ModelName = None
    use_activation: Activation = None
    user: Unused = None


class Pairing(Cutting):
    """The common fields of pair scores and reranking. A pair always has the special tokens that the model expects."""

    model: ModelName = None
    use_activation: Activation = None
    user: Unused = None
    add_special_tokens: Any = off(True)


class ScoreRequest(Pairing):
    """Pairs of texts to score: one text with each of several, or as many first ones as second ones."""

    text_1: Listed | None = None
    text_2: Listed | None = None
    data_1: Listed | None = Field(default=None, description="The same as text_1.")
    data_2: Listed | None = Field(default=None, description="The same as text_2.")
    queries: Listed | None = Field(default=None, description="The same as text_1.")
    documents: Listed | None = Field(default=None, description="The same as text_2, with queries.")
    items: Listed | None = Field(default=None, description="The same as text_2, with queries.")

    @model_validator(mode="after")
    def _has_sides(self) -> ScoreRequest:
        given = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        if not any(given == set(pair) for pair in _SIDES):
            raise BadRequest("text_1, text_2: give both, and no other texts", param="text_1")
        if len(self.firsts) not in (1, len(self.seconds)):
            raise BadRequest(
                f"text_1 has {len(self.firsts)} texts, text_2 {len(self.seconds)}: give one, or as many", param="text_1"
            )
        return self

    @property
    def firsts(self) -> list[str]:
        return _listed(next(each for each in (self.text_1, self.data_1, self.queries) if each is not None))

    @property
    def seconds(self) -> list[str]:
        given = (self.text_2, self.data_2, self.documents, self.items)
        return _listed(next(each for each in given if each is not None))


class RerankRequest(Pairing):
    """Documents to order by how well they fit a query."""

    query: Text
    documents: Listed
    top_n: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Results, at the most; 0 for all.")
    return_documents: bool | None = Field(default=None, description="false: results have no text.")

    max_tokens_per_doc: Any = off(0)

    @property
    def texts(self) -> list[str]:
        return _listed(self.documents)


class TokenizeRequest(Templating):
    """A text, or a conversation."""

    model: ModelName = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="true for a prompt, false for messages, if not said."
    )
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt, messages: give one of them", param="prompt")
        return self


class DetokenizeRequest(Body):
    """Tokens to turn into text."""

    model: ModelName = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class PoolingUsage(EmbeddingUsage):
    completion_tokens: int = 0


class Classification(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    document: RankedDocument | None = None
    relevance_score: float


class RerankAnswer(BaseModel):
    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int | None = Field(description="Tokens that the model reads at the most; null for any number.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
