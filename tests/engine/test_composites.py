"""Models made of two, and models that read sounds: their requests share steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from tests.engine.conftest import WAIT
from tests.equivalence.composites import MODELS, build

# Those whose `generate` asks a part of them, or whose requests are not known to be alike, have calls of their own.
ALONE = ("blip", "florence2", "git", "instructblip", "pix2struct", "udop")
NAMES = [name for name in MODELS if not name.startswith(ALONE)]


@pytest.mark.sampled(12, each=("name",))
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", NAMES)
def test_requests_share_steps(name: str, options: dict[str, Any]) -> None:
    """They ask for different numbers of tokens, and a sound without its padding is another one."""
    make, inputs = MODELS[name]
    model, given = build(make), inputs()
    requests = [
        {key: value[row : row + 1] for key, value in given.items()} | {"max_new_tokens": most, **options}
        for row, most in ((0, 12), (1, 8), (0, 5))
    ]
    with fastgen.disabled():
        expected = [model.generate(**request) for request in requests]
    with fastgen.Engine(model, slots=12) as engine:
        waiting = [
            engine.submit({key: request.pop(key) for key in given}, **request) for request in map(dict, requests)
        ]
        found = [request.result(WAIT) for request in waiting]
        stats = engine.stats()
    assert all(map(torch.equal, expected, found))
    assert stats["steps"] and not stats["alone"], stats
