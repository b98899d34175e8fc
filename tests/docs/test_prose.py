"""A page is read once: paragraphs are short, and README shows the whole of FastGen on a few screens."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import NAMES, ROOT, paragraphs

WORDS_IN_A_PARAGRAPH = 90
WORDS_IN_A_SENTENCE = 40
LINES_OF_README = 120
# Names of models and results, written by a script.
GENERATED = {"docs/support.md"}


@pytest.mark.parametrize("name", NAMES)
def test_paragraphs_are_short(name):
    long = [
        (line, len(text.split())) for line, text in paragraphs(ROOT / name) if len(text.split()) > WORDS_IN_A_PARAGRAPH
    ]
    assert not long, f"{name}: (line, words) {long}"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in GENERATED])
def test_sentences_are_short(name):
    long = [
        (line, len(sentence.split()), sentence)
        for line, text in paragraphs(ROOT / name)
        for cell in text.split(" | ")
        for sentence in re.split(r"(?<=[.!?:;])\s+", cell)
        if len(sentence.split()) > WORDS_IN_A_SENTENCE
    ]
    assert not long, f"{name}: {long}"


def test_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_OF_README
    assert {"make demo", "make test"} <= {line.partition(" #")[0].strip() for line in text.splitlines()}
