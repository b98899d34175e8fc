"""Texts are cut into sentences in any language, and nothing of them is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_serve.errors import BadRequest
from fastgen_serve.translation import sentences
from fastgen_serve.translation.sentences import Piece


def cut(text: str) -> list[str]:
    return [piece.text for piece in sentences.cut(text) if piece.is_sentence]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        (
            "Mr. Smith met Dr. Who at 3.15 p.m. in St. Ives. He left.",
            ["Mr. Smith met Dr. Who at 3.15 p.m. in St. Ives.", "He left."],
        ),
        ("J. R. R. Tolkien wrote it. I. e. nobody else.", ["J. R. R. Tolkien wrote it.", "I. e. nobody else."]),
        ("Am 3. Mai kam z.B. Karl. Gut so.", ["Am 3. Mai kam z.B. Karl.", "Gut so."]),
        ("See No. 5 and Fig. 250. Yes.", ["See No. 5 and Fig. 250.", "Yes."]),
        ("It was 1999. Then it was not.", ["It was 1999.", "Then it was not."]),
        ("So am I. You are not.", ["So am I.", "You are not."]),
        ('"What?" he said. "No."', ['"What?" he said.', '"No."']),
        ("Wait... what? Well... No.", ["Wait... what?", "Well...", "No."]),
        ("これは本です。あれは？そう！", ["これは本です。", "あれは？", "そう！"]),
        ("क्या? हाँ। ठीक है।", ["क्या?", "हाँ।", "ठीक है।"]),
        ("ما هذا؟ لا أعرف.", ["ما هذا؟", "لا أعرف."]),
        ("a line\nanother\r\n\r\n  - third  ", ["a line", "another", "- third"]),
        ("12 + 3 = 15. \U0001f600", []),
        ("", []),
    ],
)
def test_sentences_end_where_readers_end_them(text, expected):
    assert cut(text) == expected


@given(st.text(alphabet=st.sampled_from("aB1 .!?…\n\r\t\u2028\"')»。！」\u00a0éж中"), max_size=60))
def test_pieces_make_up_the_text(text):
    pieces = sentences.cut(text)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text and (not piece.is_sentence or piece.text == piece.text.strip()) for piece in pieces)
    assert all(piece.is_sentence or not sentences.has_letters(piece.text) for piece in pieces)


@given(st.text(alphabet=st.sampled_from("ab \u00a0中"), max_size=80), st.integers(1, 20))
def test_what_does_not_fit_is_cut(text, most):
    pieces = sentences.shorten(Piece(text, True), lambda part: len(part) <= most)
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text) <= most for piece in pieces if piece.is_sentence)


def test_words_stay_whole_where_they_fit():
    pieces = sentences.shorten(Piece("one two three four five", True), lambda part: len(part) <= 10)
    assert [piece.text for piece in pieces if piece.is_sentence] == ["one two", "three", "four five"]


@pytest.mark.parametrize("part", [".", " ", "\n", "a. ", "A. ", 'a!"', ". a", "。", "aaaa"])
def test_no_text_takes_quadratic_time(part):
    text = part * (400_000 // len(part))
    pieces = sentences.cut(text, most=len(text))
    assert "".join(piece.text for piece in pieces) == text  # within the time limit of a test


def test_no_more_pieces_are_made_than_there_may_be():
    text = "Yes. " * (sentences.MOST_PIECES // 2)
    assert len(sentences.cut(text)) == sentences.MOST_PIECES
    with pytest.raises(BadRequest, match="100000 pieces"):
        sentences.cut(text + "No.")
    with pytest.raises(BadRequest):
        sentences.limited(itertools.repeat(Piece("Yes.", True)))  # which has no end
