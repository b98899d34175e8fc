"""The layers of these tests are taken for the library's own: otherwise FastGen would leave them alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def layers_are_the_librarys(tests_are_the_librarys: None) -> None:
    """See above."""
