"""Words that have a better one are found, in whatever case, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The first pass is long", [(1, "first pass", "prefill")]),
        ("one\ntwo Matrix registers, is_spoilt", [(2, "Matrix registers", "AMX tiles"), (2, "is_spoilt", "has_nan")]),
        ("with layers.as_they_are():", [(1, "as_they_are(", "plain_linear")]),
        ("test_reads_buffers_as_they_are_then(x), padding_is_left_out(y), the first passage", []),
    ],
)
def test_words(text: str, found: list[tuple[int, str, str]]) -> None:
    assert list(check_words.found_in(text)) == found


def test_every_word_has_a_better_one_that_is_not_in_the_table() -> None:
    for better in check_words.WORDS.values():
        assert not list(check_words.found_in(better))


def test_the_command_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("fine\nthe tier 2 of it\n")
    assert check_words.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:2: say hooks, captured step in place of 'tier 2'\n"
    page.write_text("fine\n")
    assert check_words.main([str(page)]) == 0
    assert capsys.readouterr().out == ""
