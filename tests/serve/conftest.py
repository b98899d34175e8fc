"""What the tests of the server share: steps are programs, as for users, here and in processes that tests start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastgen
from fastgen.ops import gpu
from fastgen.optimizer.transformers.captured import graph_cache


@pytest.fixture(scope="module", autouse=True)
def enabled() -> Iterator[None]:
    """The tests have Triton's kernels interpreted otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "is_interpreted", lambda: False)
        patch.delenv("TRITON_INTERPRET", raising=False)
        fastgen.enable()
        yield
        fastgen.enable()
        graph_cache.drop_all()
