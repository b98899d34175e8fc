"""Models with weights in few bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastgen import settings


@pytest.fixture(autouse=True)
def exact_inputs() -> Iterator[None]:
    """Products are those of the weights as the format defines them; test_products.py has those with rounded inputs."""
    with settings.changed(few_bits_inputs="exact"):
        yield
