"""What the site changes in the HTML of a page: names stay whole where lines break.

A browser breaks a line behind a hyphen or a slash, as in the options of commands. The style sheet says what becomes of
the class `name`.
"""

from __future__ import annotations

import re
from typing import Any

_PRE = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
_CODE = re.compile(r"<code>([^<\n]{1,34})</code>")
_CELL = re.compile(r"(<t[dh]\b[^>]*>)(.*?)(</t[dh]>)", re.DOTALL)
_WORD = re.compile(r"[^\s<>&;|]*\w[-/]\w[^\s<>&;|]*")


def on_page_content(html: str, **unused: Any) -> str:
    """Called by mkdocs with the content of each page."""
    parts = _PRE.split(html)
    for place in range(0, len(parts), 2):  # the others are blocks of code, which scroll
        text = _CODE.sub(r'<code class="name">\1</code>', parts[place])
        parts[place] = _CELL.sub(lambda cell: cell[1] + _whole_words(cell[2]) + cell[3], text)
    return "".join(parts)


def _whole_words(cell: str) -> str:
    """Code is left as it is: in a table it is never broken."""
    parts = re.split(r"(<code\b.*?</code>|<[^>]*>)", cell, flags=re.DOTALL)
    parts[::2] = [_WORD.sub(r'<span class="name">\g<0></span>', text) for text in parts[::2]]
    return "".join(parts)
