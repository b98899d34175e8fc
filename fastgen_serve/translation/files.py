"""Reads and writes the files to translate, by extension."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fastgen_serve.errors import BadRequest
from fastgen_serve.translation import markup, office, sentences
from fastgen_serve.translation.sentences import Piece

# By extension, the media type of the result.
FORMATS = {
    ".txt": "text/plain; charset=utf-8",
    ".srt": "application/x-subrip; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ".odt": "application/vnd.oasis.opendocument.text",
    ".odp": "application/vnd.oasis.opendocument.presentation",
}
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# A subtitle cue: its number and time, and then its text, up to an empty line.
_CUE = re.compile(r"((?:^\d+[ \t]*\n)?^[\d:,.]+[ \t]*-->.*\n)((?:.*\S.*(?:\n|\Z))*)", re.M)
_DASHES = ("-", "–", "—")


class Document(NamedTuple):
    """A file whose sentences are to be replaced."""

    pieces: list[Piece]
    write: Callable[[Sequence[Piece]], bytes]
    """Returns the file with these pieces in place of its own, of equal number."""


def read(data: bytes, ending: str) -> Document:
    """Reads the document in a file.

    Args:
        data: the file.
        ending: its extension, one of `FORMATS`.

    Raises:
        BadRequest: it has another format, is damaged, larger than this server unpacks, or has too many sentences.
    """
    if ending in office.KINDS:
        document = office.OfficeDocument(data, office.KINDS[ending])
        return Document(document.pieces, document.write)
    cut, join = _OF_TEXT[ending]
    return Document(cut(_decoded(data)), lambda pieces: join(pieces).encode())


def _subtitles(text: str) -> list[Piece]:
    """Cuts SubRip. Joins the lines of a cue to one, except in dialogues, whose lines begin with a dash each."""
    return sentences.limited(_cues(text.replace("\r\n", "\n")))


def _cues(text: str) -> Iterator[Piece]:
    position = 0
    for match in _CUE.finditer(text):
        yield Piece(text[position : match.start()] + match[1], False)
        yield from sentences.cut(_spoken(match[2]))
        yield Piece("\n" if match[2].endswith("\n") else "", False)
        position = match.end()
    yield Piece(text[position:], False)


def _spoken(lines: str) -> str:
    """Returns the lines of a cue joined to one, but for those that begin with a dash."""
    stripped = [line.strip() for line in lines.rstrip("\n").split("\n")]
    parts = [("\n" if line.startswith(_DASHES) else " ") + line for line in stripped]
    return "".join(parts)[1:]


# By extension, the functions that cut a text into pieces, and join them.
_OF_TEXT: dict[str, tuple[Callable[[str], list[Piece]], Callable[[Sequence[Piece]], str]]] = {
    ".txt": (sentences.cut, sentences.join),
    ".html": (markup.cut, markup.join),
    ".srt": (_subtitles, sentences.join),
}


def _decoded(data: bytes) -> str:
    encoding = "utf-16" if data.startswith(_BYTE_ORDER_MARKS) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise BadRequest("the file is not in UTF-8: save it as UTF-8", param="file") from error
