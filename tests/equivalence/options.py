"""Families that stand for the others, what tests of options run over, and the check of one call."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.cases import BEAM, BEAM_SAMPLE, SAMPLE
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import BY_NAME, Family

FAMILIES = [BY_NAME[name] for name in ("bart", "t5", "gpt2", "llama")]
SEQ2SEQ = [family for family in FAMILIES if family.encoder_decoder]
DECODERS = [family for family in FAMILIES if not family.encoder_decoder]
SCORES = {"return_dict_in_generate": True, "output_scores": True}
every = pytest.mark.parametrize("family", FAMILIES, ids=str)
seq2seq = pytest.mark.parametrize("family", SEQ2SEQ, ids=str)
decoders = pytest.mark.parametrize("family", DECODERS, ids=str)
beam_and_sample = pytest.mark.parametrize("decoding", [BEAM, SAMPLE], ids=["beam", "sample"])


any_decoding = pytest.mark.parametrize(
    "decoding", [BEAM, BEAM_SAMPLE, SAMPLE, {}], ids=["beam", "both", "sample", "greedy"]
)


def checked(family: Family, decoding: dict[str, Any], options: dict[str, Any] | None = None, **inputs: Any) -> Any:
    result = check(family.build(), family.make_inputs(**inputs), {**decoding, **SCORES, **(options or {})})
    assert accelerated() == 1
    return result
