"""A release of Transformers that does not exist: the installed one with other names, and another version.

`install` changes the sources while they are imported, so the result is a package that works, as a later release would.
"""

from __future__ import annotations

import importlib.machinery
import io
import re
import sys
import tokenize
from collections.abc import Mapping
from typing import Any

VERSION = "5.99.0"


def install(names: Mapping[str, str]) -> None:
    """Whatever of Transformers is imported from now on has these other names, and is of `VERSION`.

    What has been imported already is forgotten; what the library imports, such as torch, is not.
    """
    assert "fastgen" not in sys.modules
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    kind: Any = importlib.machinery.SourceFileLoader
    get_code = kind.get_code

    def of_stub(loader: Any, fullname: str) -> Any:
        if fullname.partition(".")[0] != "transformers":
            return get_code(loader, fullname)
        source = loader.get_data(loader.path).decode()
        changed = _changed(source, names)
        # What has none of the names comes from Python's cache of bytecode, in a fraction of the time.
        return (
            get_code(loader, fullname)
            if changed == source
            else compile(changed, loader.path, "exec", dont_inherit=True)
        )

    kind.get_code = of_stub


def _changed(source: str, names: Mapping[str, str]) -> str:
    source = re.sub(r'^__version__ = ".*"$', f'__version__ = "{VERSION}"', source, flags=re.M)
    if not any(name in source for name in names):
        return source
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return tokenize.untokenize([_renamed(each, names) for each in tokens])


def _renamed(token: tokenize.TokenInfo, names: Mapping[str, str]) -> tuple[int, str]:
    kind, text = token.type, token.string
    # A module, or a decorator of Python's, may have such a name, too.
    if kind == tokenize.NAME and not re.match(r"\s*(from|import|@)", token.line):
        return kind, names.get(text, text)
    if kind == tokenize.STRING and text[1:-1] in names:
        return kind, text[0] + names[text[1:-1]] + text[-1]
    return kind, text
