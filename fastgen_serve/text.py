"""The text of tokens as they come: no character is split, nothing is taken back, and it ends at a stop string."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

# Tokens that are decoded again with each new one; at the most twice as many.
_WINDOW = 64
# Tokens of what a sequence goes on behind that are decoded with it.
_CONTEXT = 8
# What stands for bytes that are no character yet.
_INCOMPLETE = "\ufffd"
# In front of these `clean_up_tokenization_spaces` removes the space: it is not certain while they may be growing.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Decodes the tokens of one sequence as they come.

    Args:
        tokenizer: of Transformers.
        skip_special_tokens: they have no text.
        behind: tokens that the sequence goes on behind. Without them it begins a text, with no space in front.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, behind: Sequence[int] = ()) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._cleaned = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else ()
        self._bytes = _byte_tokens(tokenizer)
        self._tokens = list(behind[-_CONTEXT:])
        # Characters of the text of `_tokens` that have been given out.
        self._given = len(self._decode(self._tokens).rstrip(_INCOMPLETE))

    def push(self, tokens: Iterable[int]) -> str:
        """The text that has become certain with these tokens."""
        self._tokens.extend(tokens)
        text = self._decode(self._tokens)
        end = len(text.rstrip(_INCOMPLETE))
        if run := self._run_of_bytes():
            end = min(end, len(self._decode(self._tokens[:-run])))
        given = self._give(text, end - growing(text[:end], self._cleaned))
        if len(self._tokens) > 2 * _WINDOW:
            self._forget(text)
        return given

    def finish(self) -> str:
        """The rest of the text: there are no more tokens."""
        text = self._decode(self._tokens)
        return self._give(text, len(text))

    def _run_of_bytes(self) -> int:
        """How many of the last tokens are single bytes. All of a run is lost if, in the end, it is no text."""
        others = (number for number, token in enumerate(reversed(self._tokens)) if token not in self._bytes)
        return next(others, len(self._tokens))

    def _give(self, text: str, end: int) -> str:
        begin, self._given = self._given, max(self._given, end)
        return text[begin : self._given]

    def _forget(self, text: str) -> None:
        """Drops all tokens but the last ones, if these alone have the end of the text, and some of it is given."""
        tail = self._tokens[-_WINDOW:]
        end = self._decode(tail)
        given = self._given - (len(text) - len(end))
        if given > 0 and text.endswith(end):
            self._tokens, self._given = tail, given


class StopStrings:
    """Cuts a text that comes in pieces where the first stop string ends, and keeps back what may be growing into one.

    Args:
        strings: none of them empty.
        keeps: the stop string stays in the text.

    Attributes:
        found: the stop string that the text has ended with.
    """

    def __init__(self, strings: Sequence[str], keeps: bool = False) -> None:
        self._strings, self._keeps = tuple(strings), keeps
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can be given out with this piece of text."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(begin + len(each), begin, each) for each in self._strings if (begin := text.find(each)) >= 0]
        if ends:
            end, begin, self.found = min(ends)
            self._held = ""
            return text[: end if self._keeps else begin]
        certain = len(text) - growing(text, self._strings)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was kept back: there is no more text."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one sequence, from its tokens, up to a stop string. In one push or in many, it is the same.

    For its arguments see `Detokenizer` and `StopStrings`.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        behind: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, behind)
        self._stop = StopStrings(stop, keeps_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stop.found

    def push(self, tokens: Iterable[int]) -> str:
        """The text that has become certain with these tokens."""
        return self._stop.push(self._detokenizer.push(tokens))

    def finish(self) -> str:
        """The rest of the text."""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()


def growing(text: str, strings: Iterable[str]) -> int:
    """Characters at the end of a text that one of the strings begins with, and goes on behind: the most there are."""
    longest = (
        next((size for size in range(min(len(each) - 1, len(text)), 0, -1) if text.endswith(each[:size])), 0)
        for each in strings
    )
    return max(longest, default=0)


@lru_cache(maxsize=64)
def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that stand for bytes where the vocabulary has no characters, as in Llama's."""
    names = [f"<0x{byte:02X}>" for byte in range(0x100)]
    return frozenset(tokenizer.convert_tokens_to_ids(names)) if names[0] in tokenizer.get_vocab() else frozenset()


@lru_cache(maxsize=100_000)
def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token inside a text: with the space in front that a decoder leaves out at the beginning."""
    once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token, in UTF-8: also of one that is a part of a character."""
    text = token_text(tokenizer, token)
    if _INCOMPLETE not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    characters = _bytes_of_characters()
    return bytes(characters[each] for each in piece) if set(piece) <= characters.keys() else text.encode()


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """How vocabularies of bytes write them: what can be printed as it is, and the others from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + number): byte for number, byte in enumerate(others)}
