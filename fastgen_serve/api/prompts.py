"""Converts the texts and messages of requests to a model's tokens."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from fastgen.pipeline.encoding.loading import lowered
from fastgen.pipeline.errors import one_line
from fastgen.pipeline.inputs import with_parts
from fastgen_serve import images
from fastgen_serve.api.messages_schema import Message, Templating
from fastgen_serve.api.openai_schema import Cutting, Generation
from fastgen_serve.errors import BadRequest, TooLong
from fastgen_serve.served import ServedModel
from fastgen_serve.settings import ServeSettings
from fastgen_serve.translation.pairs import language_tokens

T = TypeVar("T")
# Characters that a tokenizer needs some milliseconds for.
_MANY = 10_000
# Characters whose tokenisation takes as long as the template's processing of one message.
_MESSAGE = 16
# Attributes of processors and tokenizers that name the placeholders of images and sounds.
_PLACEHOLDERS = (
    "image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token",
    "fake_image_token", "global_image_token", "vision_start_token", "vision_end_token",
)  # fmt: skip
# Names with another meaning for `apply_chat_template`, or for functions that it calls.
_NO_VARIABLES = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    "messages",
    "conversations",
}


async def in_turn(model: ServedModel, size: int, work: Callable[[], T], language: str | None = None) -> T:
    """Runs `work`, which uses the model's tokenizer, and returns its result. Calls exclude each other: the tokenizer
    has mutable settings.

    Args:
        size: characters, or tokens, of its input. Large inputs are processed in a thread, to keep the server
            responsive.
        language: source language for the tokenizer. Raises BadRequest as `source_language`.
    """
    lock = _lock(model.tokenizer)

    def run() -> T:
        with source_language(model, language):
            return work()

    def wait_and_run() -> T:
        with lock:
            return run()

    if size > _MANY or not lock.acquire(blocking=False):
        return await asyncio.to_thread(wait_and_run)
    try:
        return run()
    finally:
        lock.release()


@lru_cache(maxsize=64)
def _lock(tokenizer: Any) -> threading.Lock:
    """Returns the lock of a tokenizer, or of a processor, which has its own tokenizer."""
    return threading.Lock()


def size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the characters of a conversation. Each message adds some: the template processes empty ones too."""
    return sum(sum(map(len, texts_of(each))) + _MESSAGE for each in messages)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        messages: role and content of each.
        images: their URIs, in the order of the messages.
        settings: of the server, with the limits of images.
    """

    messages: list[dict[str, Any]]
    images: list[str]
    settings: ServeSettings

    @classmethod
    def of(cls, model: ServedModel, messages: Sequence[Message], settings: ServeSettings) -> Chat:
        """Makes the conversation of a request. Raises BadRequest if the model, or the server, refuses its images."""
        found = [uri for message in messages for uri in message.images]
        if found and (model.processor is None or model.info.kind != "decoder-only"):
            raise BadRequest(f"{model.name} {model.no_images or 'takes text only'}", param="messages")
        images.check_number(found, settings)
        return cls([message.as_template_reads() for message in messages], found, settings)


def tokens_of(
    model: ServedModel, prompt: str | Sequence[int], cut: Cutting, param: str, room: int = 0, any_length: bool = False
) -> tuple[int, ...]:
    """Returns the tokens of a text; token ids are returned unchanged, but for truncation.

    Args:
        model: reads the tokens.
        prompt: the text, or ids.
        cut: options of tokenisation.
        param: field that it is from.
        room: positions that new tokens need, if the model continues the prompt.
        any_length: allows no tokens, and more than the model's positions: the model does not run.

    Raises:
        TooLong: a text has more characters than any tokens within the model's positions can have.
        BadRequest: there are no tokens, or unknown ones, or `cut` leaves no room for special tokens.
    """
    most = _most(model, cut, room)
    if isinstance(prompt, str):
        if most is None and not any_length:
            _check_characters(model, (prompt,), param)
        tokens = _encoded(model, (prompt,), cut, most)[0]
    else:
        check_ids(model, prompt, param)
        tokens = tuple(prompt if most is None else (prompt[-most:] if _side(model, cut) == "left" else prompt[:most]))
    if not tokens and not any_length:
        raise BadRequest(f"{param} has no tokens: give a text, or one token at the least", param=param)
    return tokens


def pair_of(
    model: ServedModel, texts: tuple[str, str], cut: Cutting, param: str
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Returns the tokens of a pair of texts, and their token types if the model uses them.

    Raises:
        TooLong: as for `tokens_of`.
    """
    most = _most(model, cut, 0)
    if most is None:
        _check_characters(model, texts, param)
    return _encoded(model, texts, cut, most)


async def chat_inputs(
    model: ServedModel,
    chat: Chat,
    template: Templating,
    cut: Cutting,
    room: int = 0,
    any_length: bool = False,
    language: str | None = None,
) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """Returns the tokens of a conversation, image placeholders among them, and the model's other inputs.

    Args:
        chat: the conversation.
        template: options of the checkpoint's template, which runs in Transformers' sandbox.
        cut: options of tokenisation.
        room: positions that new tokens need.
        any_length: as for `tokens_of`.
        language: as for `in_turn`.

    Raises:
        BadRequest: the model has no template, or the template refuses the messages; the images are refused, or do not
            fit the text.
    """
    if chat.images and cut.truncate_prompt_tokens is not None:
        raise BadRequest("truncate_prompt_tokens: leave it out with images", param="truncate_prompt_tokens")

    def text() -> str:
        if model.processor is not None:
            _check_placeholders(model, chat.messages)
        written = chat_text(model, chat.messages, template)
        if chat.images:
            _check_characters(model, (written,), "messages")
        return written

    def tokens() -> tuple[int, ...]:
        return tokens_of(model, text(), cut, "messages", room, any_length)

    size = size_of(chat.messages)
    if not chat.images:
        return await in_turn(model, size, tokens, language), {}
    written = await in_turn(model, size, text, language)
    return await images.in_turn(lambda: _with_images(model, chat, written, cut))


def _with_images(model: ServedModel, chat: Chat, text: str, cut: Cutting) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """Runs the model's processor on a text and images. Raises BadRequest as `chat_inputs`."""
    opened = images.decoded(chat.images, chat.settings)
    bos, special = model.processor.tokenizer.bos_token, cut.special
    if "add_special_tokens" not in cut.model_fields_set:  # as in the processor's own `apply_chat_template`
        special = bos is None or not text.startswith(bos)
    try:
        with _lock(model.processor):
            found = dict(model.processor(text=text, images=[opened], add_special_tokens=special, return_tensors="pt"))
    except (ValueError, IndexError) as error:
        raise BadRequest(f"the model's processor refuses the images: {one_line(error)}", param="messages") from error
    tokens = tuple(found.pop("input_ids")[0].tolist())
    return tokens, {name: value.numpy() if hasattr(value, "numpy") else value for name, value in found.items()}


def _check_placeholders(model: ServedModel, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadRequest if a message's text contains a placeholder of an image or a sound."""
    named = {
        getattr(each, name, None) for each in (model.processor, model.processor.tokenizer) for name in _PLACEHOLDERS
    }
    tokens = {str(token) for token in named if token}
    for text in ("".join(texts_of(message)) for message in messages):
        if (token := next((token for token in tokens if token in text), None)) is not None:
            raise BadRequest(
                f"a text has {token}, which stands for an image or a sound: leave it out", param="messages"
            )


def chat_text(model: ServedModel, messages: Sequence[Mapping[str, Any]], template: Templating) -> str:
    """Writes a conversation with the model's template. Raises BadRequest as `chat_inputs`."""
    tokenizer, variables = model.tokenizer, template.chat_template_kwargs or {}
    if not tokenizer.chat_template:
        raise BadRequest(
            f"{model.name} has no chat template: use /v1/completions, or a model that was tuned for chats",
            param="messages",
        )
    if wrong := sorted(set(variables) & (_NO_VARIABLES | tokenizer.special_tokens_map.keys())):
        raise BadRequest(f"chat_template_kwargs has {wrong[0]}: leave it out", param="chat_template_kwargs")
    if "developer" not in str(tokenizer.chat_template):  # newer OpenAI clients call the system role so
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                with_parts(tokenizer, messages),
                tokenize=False,
                tools=[tool.as_template_reads() for tool in template.usable_tools] or None,
                add_generation_prompt=template.add_generation_prompt,
                continue_final_message=template.continue_final_message,
                **variables,
            )
        )
    except Exception as error:  # the template is a program: with these variables it may raise any error
        raise BadRequest(
            f"the model's chat template refuses the messages: {one_line(error)}", param="messages"
        ) from error


def check_ids(model: ServedModel, tokens: Sequence[int], param: str) -> None:
    """Raises BadRequest if some are not ids of the tokenizer."""
    size = len(model.tokenizer)
    if (wrong := next((token for token in tokens if not 0 <= token < size), None)) is not None:
        raise BadRequest(f"{param} has the token id {wrong}: {model.name} has those from 0 to {size - 1}", param=param)


def check_length(model: ServedModel, prompt: int, new_tokens: int, param: str) -> None:
    """Raises TooLong if a prompt and its new tokens exceed the model's positions."""
    positions = model.info.positions
    if positions is None or prompt + new_tokens <= positions:
        return
    raise TooLong(
        f"This model's maximum context length is {positions} tokens. However, you requested {prompt + new_tokens} "
        f"tokens ({prompt} in the {param}, {new_tokens} in the completion). Please reduce the length of the {param} or "
        "completion.",
        param=param,
    )


def text_of(model: ServedModel, prompt: str | Sequence[int], tokens: Sequence[int], body: Generation) -> str:
    """The text that a prompt is, which may have been cut to these tokens."""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return str(model.tokenizer.decode(list(tokens), skip_special_tokens=body.skip_special_tokens))


def _check_characters(model: ServedModel, texts: Sequence[str], param: str) -> None:
    """Raises TooLong if texts have more characters than any tokens within the model's positions can have. This check
    comes before tokenisation, for which other requests would wait.
    """
    size, positions = sum(map(len, texts)), model.info.positions
    if positions is None or size <= _MANY or size <= positions * (longest := _longest_token(model.tokenizer)):
        return
    raise TooLong(
        f"This model's maximum context length is {positions} tokens. However, the {param} has {size} characters, and "
        f"{positions} tokens have {positions * longest} at the most. Please reduce the length of the {param}.",
        param=param,
    )


@lru_cache(maxsize=64)
def _longest_token(tokenizer: Any) -> int:
    """Returns the characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


@contextmanager
def source_language(model: ServedModel, language: str | None) -> Iterator[None]:
    """Sets the tokenizer's source language for the duration of a block.

    Raises:
        BadRequest: the model has no languages, or not this one.
    """
    if language is None:
        yield
        return
    language_token(model, language, "src_lang")
    before, model.tokenizer.src_lang = model.tokenizer.src_lang, language
    try:
        yield
    finally:
        model.tokenizer.src_lang = before


def language_token(model: ServedModel, language: str, param: str) -> int:
    """Returns the token of a language, by the tokenizer's name for it.

    Raises:
        BadRequest: as `source_language`.
    """
    tokenizer = model.tokenizer
    if not hasattr(tokenizer, "src_lang"):
        raise BadRequest(f"{model.name} is not told languages by tokens: leave {param} out", param=param)
    known = language_tokens(tokenizer)
    if language not in known:
        raise BadRequest(f"{param} is no language of {model.name}: it has {', '.join(sorted(known))}", param=param)
    return int(known[language])


def _most(model: ServedModel, cut: Cutting, room: int) -> int | None:
    """Returns the number of tokens to truncate to; None for no truncation."""
    if cut.truncate_prompt_tokens != -1:
        return cut.truncate_prompt_tokens
    room = room if model.info.kind == "decoder-only" else 0
    return None if model.info.positions is None else max(model.info.positions - room, 1)


def _side(model: ServedModel, cut: Cutting) -> str:
    return cut.truncation_side or ("left" if model.info.kind == "decoder-only" else "right")


def _encoded(
    model: ServedModel, texts: tuple[str, ...], cut: Cutting, most: int | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Returns the token ids, and the token types if the tokenizer makes them."""
    tokenizer = model.tokenizer
    options: dict[str, Any] = {}
    if most is not None:
        special = tokenizer.num_special_tokens_to_add(pair=len(texts) > 1) if cut.special else 0
        if most < special + len(texts):
            raise BadRequest(
                f"truncate_prompt_tokens is {most}: give {special + len(texts)} or more", param="truncate_prompt_tokens"
            )
        options = {"truncation": True, "max_length": most}
    if model.info.lower_case:
        texts = tuple(map(lowered, texts))
    before, tokenizer.truncation_side = tokenizer.truncation_side, _side(model, cut)
    try:
        encoding = tokenizer(*texts, add_special_tokens=cut.special, verbose=False, **options)
    finally:
        tokenizer.truncation_side = before
    types = encoding.get("token_type_ids")
    return tuple(encoding["input_ids"]), None if types is None else tuple(types)
