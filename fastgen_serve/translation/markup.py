"""HTML: translates the text between tags, and keeps all else byte for byte.

`html.parser` takes quadratic time for unclosed tags. This parser reads each character once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape, unescape

from fastgen_serve.translation import sentences
from fastgen_serve.translation.sentences import Piece

# Elements whose content is text without tags, up to their end tag.
_RAW = frozenset("script style textarea title xmp iframe noembed noframes noscript".split())
_KEPT = frozenset("script style textarea xmp iframe noembed noframes code kbd samp var svg math object".split())
# Elements without an end tag.
_EMPTY = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_TAG = re.compile(r"<(/?)([A-Za-z][^\s/>]*)")
_VALUE_OR_END = re.compile(r"""=\s*(["'])|>""")
_KEEPING = re.compile(
    r"""\stranslate\s*=\s*["']?no(?=["'\s/>])|\sclass\s*=\s*(?:"[^"]*|'[^']*|)\bnotranslate(?=["'\s/>])""", re.I
)
_SPACES = re.compile(r"[ \t\n\r\f]+")
_LARGE_REFERENCE = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{7,});?")


def cut(html: str, most: int = sentences.MOST_PIECES) -> list[Piece]:
    """Cuts markup into pieces: sentences are plain text, all else is markup. `join` joins them.

    Each run of text between two tags is cut into sentences separately. Elements with `translate="no"` or the class
    "notranslate" are kept, and so are code, scripts and styles.

    Raises:
        BadRequest: there are more than `most` pieces.
    """
    return sentences.limited(_cut(html, most), most)


def join(pieces: Iterable[Piece]) -> str:
    """Joins pieces to markup."""
    return "".join(_escape(piece.text) if piece.is_sentence else piece.text for piece in pieces)


def _cut(html: str, most: int) -> Iterator[Piece]:
    kept, depth, in_pre = "", 0, 0
    for name, is_end, markup in _parts(html):
        if name is None:
            yield from [Piece(markup, False)] if kept else _text(markup, bool(in_pre), most)
            continue
        yield Piece(markup, False)
        if name in _EMPTY or not name:
            continue
        change = -1 if is_end else 1
        if name == "pre":
            in_pre = max(0, in_pre + change)
        if kept == name:
            depth += change
            kept = kept if depth else ""
        elif not kept and not is_end and (name in _KEPT or _KEEPING.search(markup)):
            kept, depth = name, 1


def _parts(html: str) -> Iterator[tuple[str | None, bool, str]]:
    """Yields the parts of the markup: a tag's name (None for text, "" for a comment), if it is an end tag, the text."""
    position = 0
    while position < len(html):
        begin = _next_markup(html, position)
        if begin > position:
            yield None, False, html[position:begin]
        if begin == len(html):
            return
        tag = _TAG.match(html, begin)
        position = _end_of_tag(html, tag.end()) if tag else _end_of_comment(html, begin)
        name = tag[2].lower() if tag else ""
        is_end = bool(tag and tag[1])
        yield name, is_end, html[begin:position]
        if name in _RAW and not is_end:
            end = re.compile(rf"</{name}(?=[\s/>])", re.I).search(html, position)
            until = end.start() if end else len(html)
            if until > position:
                yield None, False, html[position:until]
            position = until


def _next_markup(html: str, position: int) -> int:
    """Returns the start of the next tag or comment. Not every "<" starts one."""
    while (position := html.find("<", position)) >= 0:
        following = html[position + 1 : position + 2]
        if following in ("!", "?", "/") or (following.isascii() and following.isalpha()):
            return position
        position += 1
    return len(html)


def _end_of_tag(html: str, position: int) -> int:
    """Returns the end of the tag. A ">" in a quoted value does not end it; an unclosed tag extends to the end."""
    while match := _VALUE_OR_END.search(html, position):
        if match[1] is None:
            return match.end()
        closing = html.find(match[1], match.end())
        if closing < 0:
            break
        position = closing + 1
    return len(html)


def _end_of_comment(html: str, begin: int) -> int:
    sign = next((end for start, end in (("<!--", "-->"), ("<![CDATA[", "]]>")) if html.startswith(start, begin)), ">")
    end = html.find(sign, begin + 2)
    return len(html) if end < 0 else end + len(sign)


def _text(markup: str, in_pre: bool, most: int) -> Iterator[Piece]:
    text = unescape(_LARGE_REFERENCE.sub("\ufffd", markup))
    for piece in sentences.cut(text if in_pre else _SPACES.sub(" ", text), most):
        yield piece if piece.is_sentence else Piece(_escape(piece.text), False)


def _escape(text: str) -> str:
    return escape(text, quote=False).replace("\xa0", "&nbsp;")
