"""What runs the pages notices what a page shows wrongly."""

from __future__ import annotations

import pytest

from tests.docs import run_page
from tests.docs.pages import blocks


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  b\nc\n", "a b\nc", True),
        ("a b", "a c", False),
        ("3 calls", "4 calls", False),
        ("0.512 s", "12.7 s", True),
        ("0.512 s", "12 s", False),
        ("before ... after", "before\nanything\nafter", True),
        ("before ...", "nothing", False),
    ],
)
def test_shown_and_printed(shown, printed, same):
    assert run_page.is_shown(shown, printed) is same


@pytest.mark.parametrize("block", ['```python\nprint("a", 1)\n```', "```sh\necho a 1\n```"])
def test_an_output_that_a_page_shows_is_compared(block, tmp_path, capsys):
    page = tmp_path / "page.md"
    for output, status in (("a 1", 0), ("a 2", 1)):
        page.write_text(f'{block}\n\n```text title="Output"\n{output}\n```\n', encoding="utf-8")
        (found,) = blocks(page)
        assert run_page.main("page.md", [vars(found)]) == status
    assert "page.md:2: this block prints" in capsys.readouterr().err


def test_what_a_busy_machine_adds_is_no_difference():
    shown, busy = "first 0.1 s\ntokens: same", "steps were still being captured: later calls\n"
    assert run_page.is_shown(shown, f"first 0.2 s\n{busy}tokens: same\n")
    assert not run_page.is_shown(shown, "first 0.2 s\nsomething else\ntokens: same\n")
