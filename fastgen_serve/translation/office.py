"""Office documents: zip archives of XML. Replaces the text of paragraphs, and keeps all else."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from xml.parsers import expat
from xml.sax.saxutils import escape

from fastgen_serve.errors import BadRequest
from fastgen_serve.translation import sentences
from fastgen_serve.translation.sentences import Piece

# Limits: bytes of an unpacked archive, bytes of its XML files with text, and number of files.
MOST_BYTES = 64 * 2**20
MOST_XML_BYTES = 8 * 2**20
MOST_FILES = 4096
# Limits the elements and lines in all files with text: real ones take some dozens of bytes each.
MOST_EVENTS = 500_000
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)
_SPACES = re.compile(r"[ \t\r\n]+")
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
# Invisible marks of spelling checkers.
_UNSEEN = re.compile(rb'\s(?:dirty|err|lang)="[^"]*"|<w:(?:lang|noProof)\b[^>]*>')


@dataclass(frozen=True)
class Kind:
    """How a format stores text.

    Attributes:
        members: the files of the archive that have text.
        paragraphs: elements that are paragraphs.
        texts: elements in paragraphs that hold the text; empty if paragraphs hold it directly.
        start_tag: replaces the start tag of such an element, to preserve spaces at both ends; None to keep the tag.
        runs: elements around text of one style.
        looks: elements that define the style of a run.
        unseen: elements between two runs that do not separate their text, if their styles are equal.
    """

    members: re.Pattern[str]
    paragraphs: frozenset[str]
    texts: frozenset[str] = frozenset()
    start_tag: bytes | None = None
    runs: frozenset[str] = frozenset()
    looks: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()


_OPEN_DOCUMENT = Kind(re.compile(r"content\.xml"), frozenset({"text:p", "text:h"}))
KINDS = {
    ".docx": Kind(
        re.compile(r"word/(?:document|header\d*|footer\d*|footnotes|endnotes)\.xml"),
        frozenset({"w:p"}),
        frozenset({"w:t"}),
        b'<w:t xml:space="preserve">',
        frozenset({"w:r"}),
        frozenset({"w:rPr"}),
        frozenset({"w:proofErr", "w:bookmarkStart", "w:bookmarkEnd", "w:lastRenderedPageBreak"}),
    ),
    ".pptx": Kind(
        re.compile(r"ppt/(?:slides|notesSlides)/\w+\.xml"),
        frozenset({"a:p"}),
        frozenset({"a:t"}),
        None,
        frozenset({"a:r"}),
        frozenset({"a:rPr"}),
    ),
    ".odt": _OPEN_DOCUMENT,
    ".odp": _OPEN_DOCUMENT,
}


class OfficeDocument:
    """A document whose sentences are to be replaced.

    Attributes:
        pieces: of all its text.

    Raises:
        BadRequest: it is damaged, larger than this server unpacks, or has too many sentences.
    """

    def __init__(self, data: bytes, kind: Kind) -> None:
        self._data, self._kind = data, kind
        self._runs: dict[str, list[_Run]] = {}
        room, events = sentences.MOST_PIECES, MOST_EVENTS
        with _opened(data) as archive:
            members = [member for member in archive.infolist() if kind.members.fullmatch(member.filename)]
            if sum(member.file_size for member in members) > MOST_XML_BYTES:
                raise BadRequest(f"the text of the file has more than {MOST_XML_BYTES} bytes unpacked", param="file")
            for member in members:
                reader = _Reader(archive.read(member), kind, events)
                runs, events = reader.runs, reader.room
                for run in runs:
                    run.cut(kind, room)
                    room -= len(run.pieces)
                self._runs[member.filename] = [run for run in runs if any(piece.is_sentence for piece in run.pieces)]
        self.pieces: list[Piece] = [piece for runs in self._runs.values() for run in runs for piece in run.pieces]

    def write(self, pieces: Sequence[Piece]) -> bytes:
        """Returns the file with these pieces in place of its own, of equal number."""
        waiting = iter(pieces)
        texts = {
            name: ["".join(next(waiting).text for _ in run.pieces) for run in runs] for name, runs in self._runs.items()
        }
        out = io.BytesIO()
        with _opened(self._data) as archive, zipfile.ZipFile(out, "w") as made:
            for member in archive.infolist():
                content = archive.read(member)
                if member.filename in texts:
                    content = self._replaced(content, self._runs[member.filename], texts[member.filename])
                # The first file of an OpenDocument archive names its type, and must stay uncompressed.
                copy = zipfile.ZipInfo(member.filename, member.date_time)
                copy.compress_type, copy.external_attr = member.compress_type, member.external_attr
                made.writestr(copy, content)
        return out.getvalue()

    def _replaced(self, xml: bytes, runs: Sequence[_Run], texts: Sequence[str]) -> bytes:
        parts, position = [], 0
        for run, text in zip(runs, texts, strict=True):
            # The first span gets the whole text: a translation cannot be divided as the original was.
            for span, new in zip(run.spans, [text, *[""] * len(run.spans)], strict=False):
                tag = self._kind.start_tag
                parts.append(xml[position : span.begin] if tag is None else xml[position : span.tag] + tag)
                parts.append(escape(_NOT_XML.sub("", new)).encode("utf-8", "replace"))
                position = span.end
        return b"".join([*parts, xml[position:]])


@dataclass
class _Span:
    """Text in XML, which arrives in parts: the byte positions of its element, of the text, and of its end."""

    tag: int
    begin: int
    parts: list[str] = field(default_factory=list)
    end: int = -1


@dataclass
class _Run:
    """Text of one paragraph in one style."""

    look: bytes
    spans: list[_Span] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def cut(self, kind: Kind, most: int) -> None:
        """Cuts the text into pieces. Raises BadRequest for more than `most`."""
        text = "".join(part for span in self.spans for part in span.parts)
        self.pieces = sentences.cut(text if kind.texts else _SPACES.sub(" ", text), most)


class _Reader:
    """Finds the runs of text in XML. Expat reports byte positions, so that all else stays unchanged."""

    def __init__(self, xml: bytes, kind: Kind, most: int) -> None:
        self.room = most  # remaining elements and lines of text
        self.runs: list[_Run] = []
        self._xml, self._kind = xml, kind
        self._elements: list[tuple[str, int]] = []  # open elements, with their positions
        self._paragraphs = 0  # number of open paragraphs: one may hold a frame with others
        self._span: _Span | None = None
        self._is_new = True  # whether the next text starts a new run
        self._is_in_cdata = False
        self._look, self._look_begin = b"", -1
        self._parse()

    def _parse(self) -> None:
        parser = self._parser = expat.ParserCreate(encoding="utf-8")
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = self._characters, _refuse_doctype
        parser.StartCdataSectionHandler, parser.EndCdataSectionHandler = self._start_cdata, self._end_cdata
        parser.CommentHandler = parser.ProcessingInstructionHandler = self._other
        try:
            self._xml.decode()  # expat would also read UTF-16, but new text is inserted in UTF-8
            parser.Parse(self._xml, True)
        except (UnicodeDecodeError, expat.ExpatError) as error:
            raise BadRequest(f"the file is damaged: {error}", param="file") from error

    def _count(self) -> None:
        self.room -= 1
        if self.room < 0:
            raise BadRequest(f"the file has more than {MOST_EVENTS} elements and lines: send less of it", param="file")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._count()
        position = self._close()
        self._elements.append((name, position))
        kind = self._kind
        if name in kind.runs:
            self._look = b""
        elif name in kind.looks:
            self._look_begin = position
        elif not self._is_unseen(name):
            self._is_new = True
        self._paragraphs += name in kind.paragraphs

    def _end(self, name: str) -> None:
        position = self._close()
        kind = self._kind
        if name in kind.looks:
            self._look, self._look_begin = _UNSEEN.sub(b"", self._xml[self._look_begin : position]), -1
        elif not self._is_unseen(name):
            self._is_new = True
        self._elements.pop()
        self._paragraphs -= name in kind.paragraphs

    def _is_unseen(self, name: str) -> bool:
        """Returns whether text continues across this tag: of a text, a run or an invisible element, or in a style."""
        kind = self._kind
        return name in kind.texts or name in kind.runs or name in kind.unseen or self._look_begin >= 0

    def _characters(self, text: str) -> None:
        self._count()
        name, tag = self._elements[-1]
        if not self._paragraphs or self._is_in_cdata or (self._kind.texts and name not in self._kind.texts):
            return
        if self._span is None:
            self._span = _Span(tag, self._parser.CurrentByteIndex)
        self._span.parts.append(text)

    def _close(self) -> int:
        """Ends the current text. Returns the parser's position."""
        position, span = self._parser.CurrentByteIndex, self._span
        if span is not None:
            span.end, self._span = position, None
            if self._is_new or self.runs[-1].look != self._look:
                self.runs.append(_Run(self._look))
            self.runs[-1].spans.append(span)
            self._is_new = False
        return position

    def _other(self, *_: object) -> None:
        self._count()
        self._close()
        self._is_new = True

    def _start_cdata(self) -> None:
        self._other()
        self._is_in_cdata = True

    def _end_cdata(self) -> None:
        self._is_in_cdata = False


def _refuse_doctype(*_: object) -> None:
    raise BadRequest("the file has a document type of its own, which may define entities: it is refused", param="file")


@contextmanager
def _opened(data: bytes) -> Iterator[zipfile.ZipFile]:
    """Opens the archive if its size is within the limits. zipfile reads no more of a file than it declares."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if len(members) > MOST_FILES or sum(member.file_size for member in members) > MOST_BYTES:
                raise BadRequest(
                    f"the file has more than {MOST_FILES} parts, or {MOST_BYTES} bytes unpacked", param="file"
                )
            if len({member.filename for member in members}) < len(members):
                raise BadRequest("the file is damaged: two of its parts have one name", param="file")
            if any(member.compress_type not in _METHODS or member.flag_bits & 1 for member in members):
                raise BadRequest("the file is encrypted, or compressed in a way that is not read", param="file")
            yield archive
    except _DAMAGES as error:
        raise BadRequest(f"the file is damaged: {error}", param="file") from error
