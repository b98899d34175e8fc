"""Detokenises incrementally: never splits a character, never retracts text, and ends at a stop string."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

# Each new token is decoded together with at most twice this many last tokens.
_WINDOW = 64
# Tokens of the preceding text that are decoded with a sequence.
_CONTEXT = 8
# Stands for bytes that do not form a character yet.
_INCOMPLETE = "\ufffd"
# `clean_up_tokenization_spaces` removes the space before these: while text may grow into one, the space is not final.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Decodes the tokens of one sequence incrementally.

    Args:
        tokenizer: of Transformers.
        skip_special_tokens: whether to omit special tokens from the text.
        behind: the tokens that the sequence follows. Without them it starts a text, with no leading space.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, behind: Sequence[int] = ()) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._cleaned = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else ()
        self._bytes = _byte_tokens(tokenizer)
        self._tokens = list(behind[-_CONTEXT:])
        # Number of characters of the decoded `_tokens` that have been returned.
        self._given = len(self._decode(self._tokens).rstrip(_INCOMPLETE))

    def push(self, tokens: Iterable[int]) -> str:
        """Returns the text that these tokens make final."""
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
        """Returns the rest of the text: no more tokens follow."""
        text = self._decode(self._tokens)
        return self._give(text, len(text))

    def _run_of_bytes(self) -> int:
        """Returns how many of the last tokens are single bytes. An invalid run is replaced as a whole."""
        others = (number for number, token in enumerate(reversed(self._tokens)) if token not in self._bytes)
        return next(others, len(self._tokens))

    def _give(self, text: str, end: int) -> str:
        begin, self._given = self._given, max(self._given, end)
        return text[begin : self._given]

    def _forget(self, text: str) -> None:
        """Drops all but the last tokens, if they decode to the end of the text, part of which was returned."""
        tail = self._tokens[-_WINDOW:]
        end = self._decode(tail)
        given = self._given - (len(text) - len(end))
        if given > 0 and text.endswith(end):
            self._tokens, self._given = tail, given


class StopStrings:
    """Cuts text that arrives in pieces at the first stop string, and holds back an end that may grow into one.

    Args:
        strings: none of them empty.
        keeps: whether the stop string stays in the text.

    Attributes:
        found: the stop string that ended the text.
    """

    def __init__(self, strings: Sequence[str], keeps: bool = False) -> None:
        self._strings, self._keeps = tuple(strings), keeps
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that this piece makes final."""
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
        """Returns the text that was held back: no more follows."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one sequence, from its tokens, up to a stop string. It does not depend on how tokens are split in
    pushes.

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
        """The stop string that ended the text."""
        return self._stop.found

    def push(self, tokens: Iterable[int]) -> str:
        """Returns the text that these tokens make final."""
        return self._stop.push(self._detokenizer.push(tokens))

    def finish(self) -> str:
        """Returns the rest of the text."""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()


def growing(text: str, strings: Iterable[str]) -> int:
    """Returns the length of the longest end of a text that is a proper prefix of one of the strings."""
    longest = (
        next((size for size in range(min(len(each) - 1, len(text)), 0, -1) if text.endswith(each[:size])), 0)
        for each in strings
    )
    return max(longest, default=0)


@lru_cache(maxsize=64)
def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens for single bytes, if the vocabulary has such, as Llama's."""
    names = [f"<0x{byte:02X}>" for byte in range(0x100)]
    return frozenset(tokenizer.convert_tokens_to_ids(names)) if names[0] in tokenizer.get_vocab() else frozenset()


@lru_cache(maxsize=100_000)
def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a token in mid-text: with the leading space that a tokenizer drops at the start of a text."""
    once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Returns the bytes of a token in UTF-8, even if it is a part of a character."""
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
    """Returns how byte-level vocabularies write bytes: printable ones unchanged, the others from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + number): byte for number, byte in enumerate(others)}
