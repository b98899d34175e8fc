"""What the tests of speculative decoding share."""

from __future__ import annotations

import copy
from typing import Any

import torch

import fastgen
from fastgen.optimizer.transformers.speculation.decoding import ENTRY_POINT
from tests import near_ties
from tests.equivalence.models import BY_NAME
from tests.equivalence.others import OTHERS

KNOWN = {family.name: family for family in (*BY_NAME.values(), *OTHERS)}
GREEDY = {"do_sample": False, "num_beams": 1, "max_new_tokens": 24}


def counts() -> dict[str, int]:
    return {"accelerated": 0, "accepted": 0, "drafted": 0, "checks": 0} | fastgen.stats().get(ENTRY_POINT, {})


def assert_speculates(calls: int) -> None:
    found = counts()
    assert found["accelerated"] == calls, fastgen.stats()
    assert not found.get("not used"), found


def disturbed(model: Any, spread: float) -> Any:
    """A model that mostly says the same."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + spread * torch.randn(parameter.shape, generator=generator))
    return other


def same(model: Any, inputs: dict[str, Any], options: dict[str, Any], **draft: Any) -> None:
    """The call gives the tokens of the original code without a draft; near-ties are looked at as elsewhere."""

    def run() -> Any:
        asked = draft if fastgen.patching.is_active() else {}
        return model.generate(**copy.deepcopy(inputs), **{**options, **asked})

    near_ties.check(run)
