"""Cuts texts into sentences, by language-independent rules, and joins them again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from fastgen_serve.errors import BadRequest

# The most pieces of a request: 4 MiB of ordinary text has as many.
MOST_PIECES = 100_000
# Signs that end a sentence if white space follows, and those that need none.
_SIGNS = ".!?…।॥؟۔܀።៕။։᙮᥄‼⁇⁈⁉"
_END = re.compile(rf"""(?<![{_SIGNS}])[{_SIGNS}]+["'”’»›)\]]*(?=\s)|[。！？｡]+["'”’」』）】》]*""")
_LINE_BREAK = re.compile(r"[\n\r\u2028\u2029]\s*")
_NEXT = re.compile(r"\s*(\S?)")
_LONGEST_WORD = 32
_OPENING = "([\"'“„«‹¿¡"
# Words with a full stop that does not end a sentence; the latter if a number follows.
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr sra jr rev gen gov capt col sgt lt hon messrs mme mlle vs cf ca etc approx dept est inc ltd
    bzw usw evtl ggf sog str hr fr dipl ing bspw vgl zzgl av bd ul pl np tzn dhr mevr bv ud uds sig dott avv
    """.split()
)
_BEFORE_NUMBERS = frozenset("no nr nos art abs fig bd kap ch vol pp p s núm n º sec eq tab §".split())


@dataclass(frozen=True)
class Piece:
    """A part of a text: a sentence to translate, or text to keep."""

    text: str
    is_sentence: bool


def cut(text: str, most: int = MOST_PIECES) -> list[Piece]:
    """Cuts the text into pieces, which join to the text again. Line breaks end sentences, and are kept.

    Raises:
        BadRequest: there are more than `most` pieces.
    """
    return limited(_cut(text), most)


def join(pieces: Iterable[Piece]) -> str:
    """Joins pieces to a text."""
    return "".join(piece.text for piece in pieces)


def limited(pieces: Iterable[Piece], most: int = MOST_PIECES) -> list[Piece]:
    """Returns the pieces as a list, and stops at the limit.

    Raises:
        BadRequest: there are more than `most` pieces.
    """
    found = list(islice(pieces, most + 1))
    if len(found) > most:
        raise BadRequest(
            f"a request may have {MOST_PIECES} pieces, sentences and what is between two: send less of it at once"
        )
    return found


def shorten(piece: Piece, fits: Callable[[str], bool]) -> list[Piece]:
    """Returns the piece, or a long sentence halved until all parts fit, between two words if possible."""
    result: list[Piece] = []
    waiting = [piece]
    while waiting:
        piece = waiting.pop()
        if not piece.is_sentence or len(piece.text) < 2 or fits(piece.text):
            result.append(piece)
        else:
            waiting.extend(_halves(piece.text)[::-1])
    return result


def has_letters(text: str) -> bool:
    """Returns whether there is something to translate: numbers, signs and emoji are the same in all languages."""
    return any(character.isalpha() for character in text)


def _cut(text: str) -> Iterator[Piece]:
    begin = 0
    for match in _LINE_BREAK.finditer(text):
        yield from _cut_line(text[begin : match.start()])
        yield Piece(match[0], False)
        begin = match.end()
    yield from _cut_line(text[begin:])


def _cut_line(line: str) -> Iterator[Piece]:
    begin = 0
    for end in chain(_ends(line), [len(line)]):
        yield from _around_spaces(line[begin:end])
        begin = end


def _ends(line: str) -> Iterator[int]:
    begin = 0
    for match in _END.finditer(line):
        following = _NEXT.match(line, match.end())
        assert following is not None  # the pattern matches the empty text
        before = line[max(begin, match.start() - _LONGEST_WORD) : match.start()]
        if not following[1] or following[1].islower() or _goes_on(before, match[0], following[1]):
            continue
        yield match.end()
        begin = match.end()


def _goes_on(sentence: str, sign: str, following: str) -> bool:
    """Returns whether a full stop belongs to an abbreviation, an initial or a number."""
    if sign != ".":
        return False
    word = sentence.split()[-1].lstrip(_OPENING).casefold() if sentence.strip() else ""
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    is_ordinal = word.isdigit() and len(word) < 3
    before_number = word in _BEFORE_NUMBERS and following.isdigit()
    return is_initial or is_ordinal or "." in word.strip(".") or word in _ABBREVIATIONS or before_number


def _around_spaces(text: str) -> Iterator[Piece]:
    inner = text.strip()
    begin = text.index(inner)
    parts = (text[:begin], inner, text[begin + len(inner) :])
    yield from (Piece(part, has_letters(part)) for part in parts if part)


def _halves(text: str) -> list[Piece]:
    middle = len(text) // 2
    spaces = [match.span() for match in re.finditer(r"\s+", text)]
    begin, end = min(spaces, key=lambda span: abs(span[0] - middle), default=(middle, middle))
    parts = (text[:begin], text[begin:end], text[end:])
    return [Piece(part, has_letters(part)) for part in parts if part]
