"""OpenAI's Responses API: a chat in other schemas. Nothing is stored: each request has the whole conversation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from fastgen_serve.api import openai
from fastgen_serve.api.openai import write_error
from fastgen_serve.api.openai_answers import TokenLogprobs, Usage
from fastgen_serve.api.openai_choices import Piece
from fastgen_serve.api.responses_schema import (
    IncompleteDetails,
    OutputCall,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponseRequest,
    ResponseUsage,
)
from fastgen_serve.errors import BadRequest, ServeError

__all__ = ["router", "write_error"]

router = APIRouter(tags=["OpenAI"], responses=openai.ERRORS)
# The parameters of chat completions that have another name here.
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "include", "n": "num_beams"}


@contextmanager
def _named_as_here() -> Iterator[None]:
    try:
        yield
    except BadRequest as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


@router.post("/v1/responses", response_model=Response, responses=openai.STREAM)
async def respond(body: ResponseRequest, request: Request) -> Any:
    """The answer to a conversation."""
    with _named_as_here():
        run = await openai.conversation_run(body, body.messages(), request, "input")
        answer = _Answer(run, body)
        if body.stream:
            return await openai.streamed(run, answer.events(), answer.failed)
        (piece,), usage = await run.whole()
    answer.add(piece)
    return answer.finished(piece, usage)


@dataclass
class _Answer:
    """An answer so far, and the events that report it."""

    run: openai.Run
    body: ResponseRequest
    item: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[OutputCall] = field(default_factory=list)
    place: int | None = None
    """Index of the message in the output; None before it has begun."""
    sent: int = 0

    def add(self, piece: Piece) -> list[TokenLogprobs]:
        """Adds a piece; returns the log-probabilities of its tokens."""
        told = self.run.writer.message(piece).logprobs
        new = [] if told is None else told.content
        if self.place is None and (piece.text or (piece.end is not None and not self.calls and not piece.calls)):
            self.place = len(self.calls)
        self.text += piece.text
        self.logprobs += new
        for call in piece.calls:
            item = f"fc_{uuid.uuid4().hex}"
            made = OutputCall(id=item, status="completed", call_id=call.id, name=call.name, arguments=call.arguments)
            self.calls.append(made)
        return new

    async def events(self) -> AsyncGenerator[str, None]:
        async with aclosing(self.run.stream()) as items:
            last: Piece | None = None
            async for item in items:
                if isinstance(item, Usage):
                    assert last is not None, "there is a piece with the end"
                    yield "".join(self._ends(last, item))
                    return
                begins = "".join(self._begins()) if last is None else ""
                last = item
                yield begins + "".join(self._continues(item))

    def _begins(self) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def _continues(self, piece: Piece) -> Iterator[str]:
        had_message, had_calls = self.place is not None, len(self.calls)
        new = self.add(piece)
        if not had_message and self.place is not None:
            yield self._event("output_item.added", output_index=self.place, item=self._message("in_progress", []))
            yield self._of_part("content_part.added", part=OutputText(text=""))
        if self.place is not None:
            yield self._of_part("output_text.delta", delta=piece.text, logprobs=new)
        for number, call in enumerate(self.calls[had_calls:], had_calls):
            place = number + (self.place is not None and number >= self.place)
            where = {"item_id": call.id, "output_index": place}
            begun = call.model_copy(update={"arguments": "", "status": "in_progress"})
            yield self._event("output_item.added", output_index=place, item=begun)
            yield self._event("function_call_arguments.delta", delta=call.arguments, **where)
            yield self._event("function_call_arguments.done", arguments=call.arguments, name=call.name, **where)
            yield self._event("output_item.done", output_index=place, item=call)

    def _ends(self, last: Piece, usage: Usage) -> Iterator[str]:
        whole = self.finished(last, usage)
        if self.place is not None:
            yield self._of_part("output_text.done", text=self.text, logprobs=self.logprobs)
            yield self._of_part("content_part.done", part=self._content)
            yield self._event("output_item.done", output_index=self.place, item=whole.output[self.place])
        yield self._event(whole.status, response=whole)

    def failed(self, error: ServeError) -> str:
        return self._event("failed", response=self._response("failed", error=ResponseError(message=error.message)))

    def finished(self, last: Piece, usage: Usage) -> Response:
        """Returns the whole answer, after its last piece."""
        is_cut = last.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        output: list[OutputMessage | OutputCall] = [*self.calls]
        if self.place is not None:
            output.insert(self.place, self._message(status, [self._content]))
        return self._response(
            status,
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=output,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, total_tokens=usage.total_tokens
            ),
        )

    @property
    def _content(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self.logprobs)

    def _message(self, status: Any, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self.item, status=status, content=content)

    def _response(self, status: Any, **more: Any) -> Response:
        body = self.body
        return Response(
            id=self.run.id,
            created_at=self.run.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.run.model.name,
            temperature=body.temperature,
            text=body.text_answer,
            top_p=body.top_p,
            **body.tools_answer,
            **more,
        )

    def _of_part(self, name: str, **more: Any) -> str:
        return self._event(name, item_id=self.item, output_index=self.place, content_index=0, **more)

    def _event(self, name: str, /, **fields: Any) -> str:
        made = _Event(type=f"response.{name}", sequence_number=self.sent, **fields)
        self.sent += 1
        return f"event: {made.type}\ndata: {made.model_dump_json()}\n\n"


class _Event(BaseModel, extra="allow"):
    type: str
    sequence_number: int
