"""HTML is translated between its tags, and all else stays byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_serve.errors import BadRequest
from fastgen_serve.translation import markup
from fastgen_serve.translation.sentences import Piece


def texts(html: str) -> list[str]:
    return [piece.text for piece in markup.cut(html) if piece.is_sentence]


def translated(html: str) -> str:
    """Each sentence in capitals."""
    return markup.join([Piece(piece.text.upper(), True) if piece.is_sentence else piece for piece in markup.cut(html)])


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>one. Two</p>", "<p>ONE. TWO</p>"),
        ("a <b class='x>y'>b</b> c", "A <b class='x>y'>B</b> C"),
        ("<P TITLE=it's>a</P >b", "<P TITLE=it's>A</P >B"),
        ("<a title='say \"hi\">'>a</a>", "<a title='say \"hi\">'>A</a>"),
        ("x &amp; y &lt; z&nbsp;&copy;", "X &amp; Y &lt; Z&nbsp;©"),
        ("a\n   b", "A B"),
        ("<pre>a\n   b</pre>", "<pre>A\n   B</pre>"),
        ("<script>if (a < b) c('</p>')</script>d", "<script>if (a < b) c('</p>')</script>D"),
        ("<style>p > a {}</style><code>x <b>y</b></code>z", "<style>p > a {}</style><code>x <b>y</b></code>Z"),
        ("<!-- a --> b <![CDATA[ c ]]> <?d e?> <!doctype f>g", "<!-- a --> B <![CDATA[ c ]]> <?d e?> <!doctype f>G"),
        ("<p translate=no>a <p>b</p> c</p>d", "<p translate=no>a <p>b</p> c</p>D"),
        ('<p translate="no">a</p><p translate="yes">b</p>', '<p translate="no">a</p><p translate="yes">B</p>'),
        ('<i class="x notranslate y">a</i>b', '<i class="x notranslate y">a</i>B'),
        ('<i class="notranslated">a</i>', '<i class="notranslated">A</i>'),
        ("<title>a <b></title>c", "<title>A &lt;B&gt;</title>C"),
        ("<br>a<img alt=x>b<hr/>c", "<br>A<img alt=x>B<hr/>C"),
        ("1 < 2 and a<", "1 &lt; 2 AND A&lt;"),
        ("a <b", "A <b"),
        ("a <!-- b", "A <!-- b"),
        ("&#99999999999; &#x110000; a", "\ufffd \ufffd A"),
    ],
)
def test_text_is_translated_and_the_rest_kept(html, expected):
    assert translated(html) == expected


@given(st.text(alphabet=st.sampled_from("<>/!-?&;=\"' ab\np"), max_size=60))
def test_anything_is_read(html):
    pieces = markup.cut(html)
    once = markup.join(pieces)
    assert markup.join(markup.cut(once)) == once  # entities are written in one way from the first time on
    assert [piece.text for piece in pieces if piece.is_sentence] == texts(once)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_a_translation_is_no_markup(text):
    made = markup.join([Piece("<p>", False), Piece(text, True), Piece("</p>", False)])
    assert made.count("<") == 2


def test_no_markup_takes_quadratic_time():
    for part in (
        "<", "<!--", "<a ", "<a b='", "</", "<?", "<script>", "<pre>", "<p translate=no>", "&", '= "', "<p x=",
    ):  # fmt: skip
        assert markup.cut(part * 20_000)  # within the time limit of a test


@pytest.mark.parametrize("html", ["<p>" * 1001, "<p>" + "Yes. " * 501, "<p>Yes.</p>" * 400])
def test_no_more_pieces_are_made_than_there_may_be(html):
    with pytest.raises(BadRequest, match="pieces"):
        markup.cut(html, most=1000)
