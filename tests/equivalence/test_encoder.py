"""The encoder runs on groups of about the same length: the same results, from fewer positions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers

import fastgen
from fastgen.decoding import length_buckets
from fastgen.optimizer.transformers import buckets
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import BY_NAME, FAMILIES, FIRST_WORD, LONG, PAD, VOCABULARY, Family

SEQ2SEQ = [family for family in FAMILIES if family.encoder_decoder and family.inputs == "text"]

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and length of the groups that were made. Groups pay for tiny inputs too."""
    found: list[tuple[int, int]] = []
    by_length = length_buckets.by_length

    def recording_groups(lengths: list[int], longest: int, *cost: int | None) -> list[tuple[torch.Tensor, int]]:
        made = by_length(lengths, longest, *cost)
        found.extend((rows.shape[0], length) for rows, length in made)
        return made

    monkeypatch.setattr(length_buckets, "BUCKET_COST", 4)
    monkeypatch.setattr(length_buckets, "by_length", recording_groups)
    return found


def _inputs(lengths: list[int], side: str = "right") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(lengths))
    longest = max(lengths)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (len(lengths), longest), generator=generator)
    place, size = torch.arange(longest), torch.tensor(lengths).unsqueeze(1)
    mask = (place < size) if side == "right" else (place >= longest - size)
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


@pytest.mark.parametrize("decoding", [{}, BEAM, SAMPLE], ids=["greedy", "beam", "samples"])
@pytest.mark.parametrize("family", SEQ2SEQ, ids=str)
def test_every_model(family: Family, decoding: dict[str, Any], passes: list[tuple[int, int]]) -> None:
    model = family.build()
    check(model, _inputs([7, LONG, 20, 6, 21, LONG]), decoding)
    assert accelerated() == 1
    # Others are not known to leave padding out of everything, and run whole.
    assert bool(passes) is (type(model.get_encoder()).__module__ in buckets.ENCODERS)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_groups(name: str, passes: list[tuple[int, int]]) -> None:
    check(BY_NAME[name].build(), _inputs([7, LONG, 20, 6, 21, LONG]), BEAM)
    assert passes == [(2, 7), (2, 21), (2, LONG)]


STAY = {
    "padding in front": (_inputs([7, LONG, 20], side="left"), {}),
    "one length": (_inputs([LONG] * 3), {}),
    "no mask": ({"input_ids": _inputs([LONG] * 3)["input_ids"]}, {}),
    "one input": (_inputs([LONG]), {}),
    "a result with the cache in it": (_inputs([7, LONG, 20]), {"return_dict_in_generate": True}),
    "attentions that nobody gets": (_inputs([7, LONG, 20]), {"output_attentions": True}),
    "hidden states that nobody gets": (_inputs([7, LONG, 20]), {"output_hidden_states": True}),
    "hidden states": (_inputs([7, LONG, 20]), {"return_dict_in_generate": True, "output_hidden_states": True}),
}


@pytest.mark.parametrize("case", STAY)
def test_one_pass_where_groups_do_not_pay_or_are_seen(case: str, passes: list[tuple[int, int]]) -> None:
    inputs, options = STAY[case]
    check(BY_NAME["bart"].build("eager"), inputs, options)
    assert passes == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int32])
def test_masks_of_other_types(dtype: torch.dtype, passes: list[tuple[int, int]]) -> None:
    inputs = _inputs([7, LONG, 20, 6, 21, LONG])
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    check(BY_NAME["bart"].build(), inputs, BEAM)
    assert len(passes) == 3


def test_an_encoder_of_another_kind_runs_whole(passes: list[tuple[int, int]]) -> None:
    """ConvBERT looks at neighbouring positions, padding or not; BERT gives more than its states."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": VOCABULARY, "pad_token_id": PAD}
    for kind in ("convbert", "bert"):
        source = transformers.AutoConfig.for_model(kind, **sizes)
        target = transformers.AutoConfig.for_model("bert", **sizes, is_decoder=True, add_cross_attention=True)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(source, target)
        torch.manual_seed(0)
        model = transformers.EncoderDecoderModel(config).eval()
        model.generation_config.update(decoder_start_token_id=1, pad_token_id=PAD, eos_token_id=2, max_new_tokens=6)
        check(model, _inputs([7, LONG, 20, 6]), BEAM)
    assert passes == []


def test_layers_with_one_scale_for_all_rows(passes: list[tuple[int, int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(BY_NAME["bart"].build()), {torch.nn.Linear}).eval()
    check(model, _inputs([7, LONG, 20, 6]), BEAM)
    assert passes == []


def test_a_hole_in_the_mask(passes: list[tuple[int, int]]) -> None:
    inputs = _inputs([7, LONG, 20, 6])
    inputs["attention_mask"][2, 3] = 0
    check(BY_NAME["bart"].build(), inputs, BEAM)
    assert passes == [(2, 7), (2, LONG)]


def test_a_failure_in_a_group(monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, int]]) -> None:
    fastgen.enable(strict=False)

    def failing(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(buckets, "_check_nothing_else", failing)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(BY_NAME["bart"].build(), _inputs([7, LONG, 20]), BEAM)
