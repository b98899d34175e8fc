"""FairSeq's binary data sets, where their files are damaged."""

from __future__ import annotations

import contextlib
from typing import Any


def close(wrapped: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `MMapIndexedDataset.__del__` and of that of its index.

    Both close what they have mapped. Where opening it has failed there is nothing to close, and the error that says so
    should not be followed by one about that.
    """
    with contextlib.suppress(AttributeError):
        wrapped(*args, **kwargs)
