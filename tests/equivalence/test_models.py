"""Every model that must be accelerated, over ways of decoding and shapes of the batch: the same tokens and scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import settings
from tests.equivalence.cases import DECODING, SHAPES, shapes_of
from tests.equivalence.check import accelerated, check, fallbacks, run
from tests.equivalence.conftest import SharedPrefixes
from tests.equivalence.models import FAMILIES, Family

MODELS = [(family, attention) for family in FAMILIES for attention in family.attentions()]
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True}

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(8)]


def _id(value: Any) -> str:
    return str(value).replace(" ", "-").replace(",", "")


@pytest.mark.parametrize("decoding", DECODING, ids=_id)
@pytest.mark.parametrize(("family", "attention"), MODELS, ids=_id)
def test_decoding(family: Family, attention: str, decoding: str) -> None:
    """All ways of decoding, on a padded batch."""
    window_is_exceeded = family.exceeds_window(DECODING[decoding])
    if window_is_exceeded:
        fastgen.enable(strict=False)
    check(family.build(attention), family.make_inputs(), {**DECODING[decoding], **EVERYTHING})
    beyond = (0, {"more positions than the sliding window": 1})  # unless a captured step serves it: test_programs.py
    assert (accelerated(), fallbacks()) in ([beyond, (1, {})] if window_is_exceeded else [(1, {})])


@pytest.mark.parametrize(
    ("family", "attention", "shape"),
    [(*model, shape) for model in MODELS for shape in shapes_of(model[0]) if shape != "padded"],
    ids=_id,
)
def test_shapes(family: Family, attention: str, shape: str) -> None:
    """Beam search on batches of other shapes."""
    check(family.build(attention), family.make_inputs(**SHAPES[shape]), {**DECODING["beam"], **EVERYTHING})
    assert accelerated() == 1


@pytest.mark.parametrize(("family", "attention"), MODELS, ids=_id)
def test_prefix_is_shared(family: Family, attention: str, shared_prefixes: SharedPrefixes) -> None:
    """The prompt or source is kept once per input, and no model makes the full tensor of it while it decodes."""
    with settings.changed(captured_step="never"):  # a step that was captured in another test shows nothing
        run(family.build(attention), family.make_inputs(), DECODING["beam"])
    assert shared_prefixes.made > 0
    assert shared_prefixes.full == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES, ids=_id)
def test_grid_has_teeth(family: Family) -> None:
    """The grid could not pass by luck: sequences vary, beams swap, and they end at different steps."""
    result = run(family.build(), family.make_inputs(), {**DECODING["beam"], "return_dict_in_generate": True})
    chosen = result.beam_indices
    said = result.sequences[:, -chosen.shape[1] :]
    assert len(said[said >= 0].unique()) >= 6
    live = chosen >= 0
    assert int(((chosen.diff(dim=1) != 0) & live[:, 1:]).sum()) >= 4
    assert len(torch.unique(live.sum(dim=1))) > 1
