"""The site in a real browser, wide and as on a telephone: nothing is cut, and tables break no names.

Needs selenium, and chromium with its driver (`apt-get install chromium chromium-driver`).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import in_browser, resize, started
from tests.docs.pages import ROOT

pytestmark = [
    in_browser,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the package mkdocs is not installed"),
]

WIDTHS = (1280, 390)  # of a laptop, and of a telephone
HEIGHT = 844
# What is wrong with the page that is shown, a line each. A table or a block of code that is too wide scrolls by itself.
FAULTS = """
const faults = [];
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > window.innerWidth)
    faults.push(`the page is ${document.documentElement.scrollWidth} wide`);
const scrolls = element => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
for (const element of document.querySelectorAll("article *")) {
    const box = element.getBoundingClientRect();
    if (box.width === 0 || (box.left >= -1 && box.right <= width + 1)) continue;
    let outer = element;
    while (outer !== null && !scrolls(outer)) outer = outer.parentElement;
    if (outer === null)
        faults.push(`${element.tagName} from ${box.left} to ${box.right}: ${element.textContent.slice(0, 60)}`);
}
for (const cell of document.querySelectorAll("td, th")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode())
        for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
            const range = document.createRange();
            range.setStart(texts.currentNode, word.index);
            range.setEnd(texts.currentNode, word.index + word[0].length);
            if (new Set(Array.from(range.getClientRects(), line => Math.round(line.top))).size > 1)
                faults.push(`a table breaks ${word[0]}`);
        }
}
for (const image of document.querySelectorAll("article img"))
    if (!image.complete || image.naturalWidth === 0) faults.push(`no picture: ${image.src}`);
return faults;
"""


@pytest.fixture(scope="module")
def site(shared_folder) -> Path:
    with shared_folder("site") as (folder, is_new):
        if is_new:
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as driver:
        yield driver


def faults(browser: Any, page: Path, *widths: int) -> list[str]:
    """Those of a page that is opened once, and then made narrower."""
    found = []
    for number, width in enumerate(widths):
        resize(browser, width, HEIGHT)
        if number == 0:
            browser.get(page.as_uri())
        found += [f"at {width}: {fault}" for fault in browser.execute_script(FAULTS)]
    return found


def test_pages_fit_and_tables_break_no_names(site, browser):
    pages = sorted(path for path in site.glob("*.html"))
    assert len(pages) > 20
    found = {page.name: wrong for page in pages if (wrong := faults(browser, page, *WIDTHS))}
    assert not found


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('<p style="width: 3000px">wide</p>', "the page is"),
        ('<div style="overflow: hidden"><p style="width: 3000px">cut</p></div>', "from"),
        (
            '<table><td style="width: 40px; max-width: 40px"><code>--batch-size</code></td></table>',
            "breaks --batch-size",
        ),
        ('<img src="nowhere.png" width="10">', "no picture"),
        ('<pre style="overflow: auto"><code style="display: block; width: 3000px">scrolls</code></pre>', None),
    ],
)
def test_faults_are_noticed(browser, tmp_path, body, wrong):
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta name=viewport content=width=device-width><article>{body}</article>")
    found = [fault for fault in faults(browser, page, *WIDTHS) if fault.startswith(f"at {WIDTHS[1]}")]
    assert any(wrong in fault for fault in found) if wrong else not found, found


def test_nothing_is_fetched_from_another_site(site):
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        for attribute in ('src="http', "src=//", '<link rel="stylesheet" href="http'):
            assert attribute not in text, page.name
