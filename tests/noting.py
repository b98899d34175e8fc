"""Notes of what a function is called with while a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def noted(
    patch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[..., Any] = lambda *given, **named: None
) -> list[Any]:
    """An entry for each call of a function or a method: what `what` says of its arguments. The call itself goes on."""
    function, found = getattr(owner, name), list[Any]()

    def noting(*given: Any, **named: Any) -> Any:
        found.append(what(*given, **named))
        return function(*given, **named)

    patch.setattr(owner, name, noting)
    return found
