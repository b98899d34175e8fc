"""A model that has been trained: FastGen gives its hypotheses, and they are good ones."""

from __future__ import annotations

import pytest
import torch

from tests.fairseq import trained
from tests.fairseq.check import accelerated, check
from tests.fairseq.test_generate import generator_for

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def sentences() -> tuple[list[list[int]], list[list[int]]]:
    """Sources that it has not seen, and their translations."""
    torch.manual_seed(1)
    return trained.pairs(16)


def test_it_translates(trained_model, sentences):
    sources, targets = sentences
    found = check(lambda: generator_for([trained_model.model], beam_size=4), trained.batch(sources))
    right = [
        hypotheses[0]["tokens"].tolist() == [*target, 2] for hypotheses, target in zip(found, targets, strict=True)
    ]
    assert sum(right) >= 12 and accelerated() == 1
