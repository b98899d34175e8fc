"""Converts the tokens of sequences to the choices of OpenAI's interface, whole or in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastgen_serve.api import openai_answers as answers
from fastgen_serve.api.openai_schema import Generation
from fastgen_serve.api.tools import Answer, Call, Part
from fastgen_serve.jobs import Delta, TokenLogprob
from fastgen_serve.jobs import Sequence as Result
from fastgen_serve.text import TextStream, token_bytes, token_text

# JSON has no infinity: impossible tokens get this log-probability, as in vLLM.
_LOWEST = -9999.0


@dataclass
class Piece:
    """A part of a choice's answer.

    Attributes:
        index: of the choice.
        text: final text since the last piece.
        tokens: new ones since the last piece.
        logprobs: of these tokens.
        offset: characters of the tokens before these.
        is_first: whether it is the first piece of its choice.
        end: the sequence, in the last piece.
        generated: tokens of its choice so far, EOS among them.
        stopped: the stop string that ended the text.
        reasoning: the model's reasoning, if it may call tools.
        calls: tool calls, which the text does not contain.
        first_call: number of calls in earlier pieces.
        ends_in_calls: whether the choice has called tools, and the request did not name one.
        prompt: log-probabilities of the prompt's tokens except the first, if the request asks for them.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    offset: int
    is_first: bool
    generated: int
    end: Result | None = None
    stopped: str | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()
    first_call: int = 0
    ends_in_calls: bool = False
    prompt: tuple[TokenLogprob, ...] | None = None

    @property
    def finish_reason(self) -> Any:
        if self.end is None:
            return None
        if self.ends_in_calls and self.end.finish_reason == "stop":
            return "tool_calls"
        return "stop" if self.stopped is not None else self.end.finish_reason


@dataclass
class _Choice:
    """The received part of a sequence, and what of it has been emitted."""

    index: int
    text: TextStream
    answer: Answer | None = None
    received: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offset: int = 0
    calls: int = 0
    is_first: bool = True

    def push(self, delta: Delta) -> Part:
        self._take(delta.tokens, delta.logprobs)
        text = self.text.push(delta.tokens)
        return Part(text) if self.answer is None else self.answer.push(text)

    def finish(self, sequence: Result) -> Part:
        rest = sequence.tokens[self.received :]
        self._take(rest, None if sequence.logprobs is None else sequence.logprobs[self.received :])
        text = self.text.push(rest) + self.text.finish()
        return Part(text) if self.answer is None else self.answer.push(text) + self.answer.finish()

    def _take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self.received += len(tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs or ())


class Choices:
    """The choices of a request.

    Args:
        tokenizer: of the model.
        texts: the text stream of each choice, in order.
        answer: creates the parser of an answer that may have tool calls; None without tools.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[TextStream], answer: Callable[[], Answer] | None = None) -> None:
        self._tokenizer = tokenizer
        self._choices = [_Choice(index, text, answer and answer()) for index, text in enumerate(texts)]

    def pieces(self, first: int, event: Delta | Sequence[Result]) -> Iterator[Piece]:
        """Yields the pieces that become final: at most one for a delta, one for each result.

        Args:
            first: index of the first choice of the event's input.
            event: new tokens, or the final sequences of the input.
        """
        if isinstance(event, Delta):
            choice = self._choices[first + event.index]
            if part := choice.push(event):
                yield self._piece(choice, part)
            return
        for number, sequence in enumerate(event):
            choice = self._choices[first + number]
            yield self._piece(choice, choice.finish(sequence), sequence)

    def _piece(self, choice: _Choice, part: Part, end: Result | None = None) -> Piece:
        tokens, logprobs = tuple(choice.tokens), tuple(choice.logprobs)
        made = Piece(
            choice.index,
            part.content,
            tokens,
            logprobs,
            choice.offset,
            choice.is_first,
            choice.received if end is None else end.generated,
            end,
            choice.text.stopped if end else None,
            part.reasoning,
            part.calls,
            choice.calls,
        )
        choice.calls += len(part.calls)
        made.ends_in_calls = choice.answer is not None and choice.calls > 0 and not choice.answer.is_named
        choice.tokens.clear()
        choice.logprobs.clear()
        choice.is_first = False
        if logprobs:
            choice.offset += sum(len(token_text(self._tokenizer, token)) for token in tokens)
        return made


class Writer:
    """Writes pieces in the interface's schemas, with the details that the request wants."""

    def __init__(self, tokenizer: Any, body: Generation) -> None:
        self._tokenizer, self._body = tokenizer, body
        self._has_logprobs = body.wanted_logprobs is not None

    def completion(self, piece: Piece, prompt: Sequence[int], echoed: str = "") -> answers.CompletionChoice:
        """Returns a choice of a completion, or a chunk of one. `echoed` comes before its text."""
        made = answers.CompletionChoice(
            text=echoed + piece.text,
            logprobs=self._completion_logprobs(piece, prompt) if self._has_logprobs else None,
            **self._common(piece),
        )
        if self._body.return_token_ids and piece.is_first:
            made.prompt_token_ids = list(prompt)
        return made

    def message(self, piece: Piece) -> answers.ChatChoice:
        content = None if piece.calls and not piece.text else piece.text
        message = answers.AnswerMessage(role="assistant", content=content, refusal=None, **self._more(piece))
        return answers.ChatChoice(message=message, logprobs=self._chat_logprobs(piece), **self._common(piece))

    def chunk(self, piece: Piece) -> answers.ChunkChoice:
        more = self._more(piece)
        for number, call in enumerate(more.get("tool_calls", ()), piece.first_call):
            call.index = number
        if piece.text or not more:
            more["content"] = piece.text
        delta = answers.DeltaMessage(**more)
        return answers.ChunkChoice(delta=delta, logprobs=self._chat_logprobs(piece), **self._common(piece))

    def _more(self, piece: Piece) -> dict[str, Any]:
        """Returns the fields of a message other than its content."""
        made: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.calls:
            made["tool_calls"] = [
                answers.ToolCall(
                    id=call.id,
                    type="function",
                    function=answers.CalledFunction(name=call.name, arguments=call.arguments),
                )
                for call in piece.calls
            ]
        return made

    def _common(self, piece: Piece) -> dict[str, Any]:
        made: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason}
        if piece.end is not None and piece.end.score is not None:
            made["score"] = piece.end.score
        if piece.stopped is not None:
            made["stop_reason"] = piece.stopped
        elif piece.end is not None and piece.end.ended_by in (self._body.stop_token_ids or ()):
            made["stop_reason"] = piece.end.ended_by
        if self._body.return_token_ids:
            made["token_ids"] = list(piece.tokens)
        return made

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else token_text(self._tokenizer, token)

    def _completion_logprobs(self, piece: Piece, prompt: Sequence[int]) -> answers.CompletionLogprobs:
        told = (*(piece.prompt or ()), *piece.logprobs)
        tokens, values = [each.token for each in told], [_finite(each.logprob) for each in told]
        tops = [
            {self._name(token): _finite(value) for token, value in (*each.top, (each.token, each.logprob))}
            for each in told
        ]
        # The first token of a prompt has no log-probability.
        first: list[None] = [] if piece.prompt is None else [None]
        tokens = [*prompt[: len(first)], *tokens]
        lengths = (len(token_text(self._tokenizer, token)) for token in tokens[:-1])
        return answers.CompletionLogprobs(
            text_offset=list(itertools.accumulate(lengths, initial=piece.offset)) if tokens else [],
            tokens=[self._name(token) for token in tokens],
            token_logprobs=[*first, *values],
            top_logprobs=[*first, *tops],
        )

    def _chat_logprobs(self, piece: Piece) -> answers.ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        content = [
            answers.TokenLogprobs(
                **self._named(each.token, each.logprob),
                top_logprobs=[answers.TopLogprob(**self._named(*pair)) for pair in each.top],
            )
            for each in piece.logprobs
        ]
        return answers.ChatLogprobs(content=content, refusal=None)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes(self._tokenizer, token)),
        }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
