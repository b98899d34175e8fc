"""The prefill of decoder-only models runs on groups of about the same length: the same results, fewer positions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fastgen
from fastgen import releases
from fastgen.decoding import length_buckets
from fastgen.optimizer.transformers import buckets
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.models import BY_NAME, FAMILIES, FIRST_WORD, LONG, PAD, VOCABULARY, Family

DECODERS = [family for family in FAMILIES if not family.encoder_decoder]
LENGTHS = [7, LONG, 20, 6, 21, LONG]

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and length of the groups that were run. Groups pay for tiny inputs too."""
    found: list[tuple[int, int]] = []
    in_groups = buckets._prefill_buckets

    def recording(groups: buckets.Buckets, wrapped: Any, ids: torch.Tensor, *arguments: Any) -> Any:
        found.extend(tuple(ids[rows, positions].shape) for rows, positions in groups)
        return in_groups(groups, wrapped, ids, *arguments)

    monkeypatch.setattr(length_buckets, "BUCKET_COST", 4)
    monkeypatch.setattr(buckets, "_prefill_buckets", recording)
    return found


def _inputs(lengths: list[int], side: str = "left") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(lengths))
    longest = max(lengths)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (len(lengths), longest), generator=generator)
    place, size = torch.arange(longest), torch.tensor(lengths).unsqueeze(1)
    mask = (place >= longest - size) if side == "left" else (place < size)
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


@pytest.mark.parametrize("decoding", [{}, BEAM, SAMPLE], ids=["greedy", "beam", "samples"])
@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_every_model(
    family: Family, decoding: dict[str, Any], passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family.exceeds_window(decoding):
        monkeypatch.setenv("FASTGEN_STRICT", "0")
        fastgen.enable(strict=False)
    check(family.build(), _inputs(LENGTHS), decoding)
    assert passes == ([(2, 7), (2, 21), (2, LONG)] if accelerated() else [])
    assert accelerated() == (not family.exceeds_window(decoding))


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_the_model_gets_no_padding_of_shorter_prompts(
    passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, embedding = [], torch.nn.functional.embedding

    def recording(ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return embedding(ids, *arguments)

    monkeypatch.setattr(torch.nn.functional, "embedding", recording)
    BY_NAME["llama"].build().generate(**_inputs(LENGTHS), max_new_tokens=2)
    assert seen == [(2, 7), (2, 21), (2, LONG), (6, 1)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_window_shorter_than_some_prompts(attention: str, passes: list[tuple[int, int]]) -> None:
    check(BY_NAME["mistral-short-window"].build(attention), _inputs([7, LONG, 20, 41, LONG]), BEAM)
    assert passes == [(1, 7), (1, 20), (3, LONG)]


def _full_cache() -> dict[str, Any]:
    return releases.with_cache(DynamicCache())


def _positions(inputs: dict[str, Any]) -> torch.Tensor:
    return (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)


def test_positions_that_the_user_gives(passes: list[tuple[int, int]]) -> None:
    inputs = _inputs(LENGTHS)
    check(BY_NAME["gpt2"].build(), {**inputs, "position_ids": _positions(inputs) + 3}, BEAM)
    assert len(passes) == 3


STAY: dict[str, tuple[dict[str, Any], Any]] = {
    "padding behind": (_inputs(LENGTHS, side="right"), {}),
    "one length": (_inputs([LONG] * 3), {}),
    "no mask": ({"input_ids": _inputs([LONG] * 3)["input_ids"]}, {}),
    "one input": (_inputs([LONG]), {}),
    "a result with the cache in it": (_inputs(LENGTHS), {"return_dict_in_generate": True}),
    "a cache of the user's": (_inputs(LENGTHS), _full_cache),
    "attentions that nobody gets": (_inputs(LENGTHS), {"output_attentions": True}),
    "hidden states that nobody gets": (_inputs(LENGTHS), {"output_hidden_states": True}),
    "chunks": (_inputs(LENGTHS), {"prefill_chunk_size": 16}),
    "token types": ({**_inputs(LENGTHS), "token_type_ids": _inputs(LENGTHS)["attention_mask"]}, {}),
}


@pytest.mark.parametrize("case", STAY)
@pytest.mark.filterwarnings("ignore")
def test_one_pass_where_groups_do_not_pay_or_are_seen(case: str, passes: list[tuple[int, int]]) -> None:
    inputs, options = STAY[case]
    check(BY_NAME["gpt2"].build("eager"), inputs, options)
    assert passes == []
    assert accelerated() == 1, fallbacks()


def test_a_hole_in_the_mask(passes: list[tuple[int, int]]) -> None:
    inputs = _inputs([7, LONG, 20, 6])
    inputs["attention_mask"][2, -3] = 0
    check(BY_NAME["gpt2"].build(), inputs, BEAM)
    assert passes == [(2, 7), (2, LONG)]


def test_layers_with_one_scale_for_all_rows(passes: list[tuple[int, int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(BY_NAME["llama"].build()), {torch.nn.Linear})
        check(model.eval(), _inputs([7, LONG, 20, 6]), BEAM)
    assert passes == []


def test_a_decoder_that_is_not_known(passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "DECODERS", buckets.DECODERS - {"transformers.models.gpt2.modeling_gpt2"})
    check(BY_NAME["gpt2"].build(), _inputs(LENGTHS), BEAM)
    assert passes == []


def test_a_failure_in_a_group(monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, int]]) -> None:
    fastgen.enable(strict=False)

    def failing(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(buckets, "_check_nothing_else", failing)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(BY_NAME["gpt2"].build(), _inputs(LENGTHS), BEAM)
    assert passes
