"""Every model that must be accelerated, over ways of decoding and shapes of the batch: the same tokens and scores."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.cases import DECODING, SHAPES, shapes_of
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import FAMILIES, Family

MODELS = [(family, attention) for family in FAMILIES for attention in family.attentions()]
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True}

pytestmark = pytest.mark.usefixtures("strict")


def _id(value: Any) -> str:
    return str(value).replace(" ", "-").replace(",", "")


@pytest.mark.parametrize("decoding", DECODING, ids=_id)
@pytest.mark.parametrize(("family", "attention"), MODELS, ids=_id)
def test_decoding(family: Family, attention: str, decoding: str) -> None:
    """All ways of decoding, on a padded batch."""
    model = family.build(attention)
    result = check(model, family.make_inputs(), {**DECODING[decoding], **EVERYTHING})
    assert accelerated() == 1
    assert _varies(result)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "padded"], ids=_id)
@pytest.mark.parametrize(("family", "attention"), MODELS, ids=_id)
def test_shapes(family: Family, attention: str, shape: str) -> None:
    """Beam search on batches of other shapes."""
    if shape not in shapes_of(family):
        shape = "padded"
    check(family.build(attention), family.make_inputs(**SHAPES[shape]), {**DECODING["beam"], **EVERYTHING})
    assert accelerated() == 1


def _varies(result: Any) -> bool:
    return len(result.sequences.unique()) > 5
