"""Encoders, and the prefill of decoder-only models, run on groups of about the same length, with the same results."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import fastgen
from fastgen import releases
from fastgen.decoding import unpadding
from fastgen.optimizer.transformers import buckets
from fastgen.optimizer.transformers.encoders.stacks import way_of
from fastgen.optimizer.transformers.encoders.unpadded_forward import UnpaddedForward
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.models import BY_NAME, FAMILIES, LONG, PAD, VOCABULARY, Family, padded
from tests.noting import noted

LENGTHS = [7, LONG, 20, 6, 21, LONG]
GROUPS = [(2, 7), (2, 21), (2, LONG)]
# A model with an encoder, whose texts have padding on the right, and a decoder-only one.
SIDES = {"bart": "right", "gpt2": "left"}

pytestmark = pytest.mark.usefixtures("strict")
both = pytest.mark.parametrize("name", SIDES)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and length of each group. Groups pay for tiny inputs, too."""
    found: list[tuple[int, int]] = []
    groups = buckets._buckets

    def recording(call: Any, part: Any, ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        made = groups(call, part, ids, *more, **named)
        found.extend(tuple(ids[rows, positions].shape) for rows, positions in made)
        return made

    monkeypatch.setattr(unpadding, "BUCKET_COST", 4)
    monkeypatch.setattr(buckets, "_buckets", recording)
    return found


@pytest.mark.parametrize("decoding", [{}, BEAM, SAMPLE], ids=["greedy", "beam", "samples"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.inputs == "text"], ids=str)
def test_every_model(family: Family, decoding: dict[str, Any], passes: list[tuple[int, int]]) -> None:
    model, exceeds = family.build(), family.exceeds_window(decoding)
    fastgen.enable(strict=not exceeds)
    check(model, padded(LENGTHS, "right" if family.encoder_decoder else "left"), decoding)
    assert accelerated() == (not exceeds)
    # Encoders that are not known to ignore all padding run whole.
    known = not family.encoder_decoder or way_of(model.get_encoder()) is not None
    assert passes == (GROUPS if known and not exceeds else [])


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_the_model_gets_no_padding_of_shorter_prompts(
    passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = noted(monkeypatch, torch.nn.functional, "embedding", lambda ids, *more: tuple(ids.shape))
    BY_NAME["llama"].build().generate(**padded(LENGTHS, "left"), max_new_tokens=2)
    assert seen == [*GROUPS, (6, 1)]


def test_an_encoder_whose_hooks_were_removed_before_fastgen_was_enabled(passes: list[tuple[int, int]]) -> None:
    """Accelerate has left the library's own forward pass behind as an attribute."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = copy.deepcopy(BY_NAME["bart"].build())
    fastgen.disable()
    for part in model.modules():
        hooks.add_hook_to_module(part, hooks.ModelHook())
        hooks.remove_hook_from_module(part)
    fastgen.enable()
    encoder = model.get_encoder()
    assert vars(encoder)["forward"].__func__ is not type(encoder).forward
    check(model, padded(LENGTHS), BEAM)
    assert passes == GROUPS and accelerated() == 1, fallbacks()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_window_shorter_than_some_prompts(attention: str, passes: list[tuple[int, int]]) -> None:
    check(BY_NAME["mistral-short-window"].build(attention), padded([7, LONG, 20, 41, LONG], "left"), BEAM)
    assert passes == [(1, 7), (1, 20), (3, LONG)]


def test_positions_that_the_user_gives(passes: list[tuple[int, int]]) -> None:
    inputs = padded(LENGTHS, "left")
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    check(BY_NAME["gpt2"].build(), {**inputs, "position_ids": positions + 3}, BEAM)
    assert passes == GROUPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_masks_of_other_types(dtype: torch.dtype, passes: list[tuple[int, int]]) -> None:
    inputs = padded(LENGTHS)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    check(BY_NAME["bart"].build(), inputs, BEAM)
    assert passes == GROUPS


STAY: dict[str, dict[str, Any]] = {
    "attentions that nobody gets": {"output_attentions": True},
    "hidden states that nobody gets": {"output_hidden_states": True},
    "a result with the cache in it": {"return_dict_in_generate": True},
}


@both
@pytest.mark.parametrize("case", ["the other side", "one length", "no mask", "one input", *STAY])
def test_one_pass_if_groups_do_not_pay_or_are_seen(name: str, case: str, passes: list[tuple[int, int]]) -> None:
    side = SIDES[name] if case != "the other side" else {"left": "right", "right": "left"}[SIDES[name]]
    lengths = {"one length": [LONG] * 3, "no mask": [LONG] * 3, "one input": [LONG]}
    inputs = padded(lengths.get(case, LENGTHS), side)
    if case == "no mask":
        del inputs["attention_mask"]
    with warnings.catch_warnings():  # of padding on the other side
        warnings.simplefilter("ignore")
        check(BY_NAME[name].build("eager"), inputs, STAY.get(case, {}))
    assert passes == [] and accelerated() == 1, fallbacks()


@pytest.mark.parametrize("case", ["a cache of the user's", "chunks", "token types"])
def test_one_prefill(case: str, passes: list[tuple[int, int]]) -> None:
    inputs, options = padded(LENGTHS, "left"), {"prefill_chunk_size": 16} if case == "chunks" else {}
    if case == "token types":
        inputs["token_type_ids"] = inputs["attention_mask"]
    mine = case == "a cache of the user's"
    check(BY_NAME["gpt2"].build(), inputs, lambda: releases.with_cache(DynamicCache()) if mine else options)
    assert passes == [] and accelerated() == 1, fallbacks()


def test_an_encoder_of_another_kind_runs_whole(passes: list[tuple[int, int]]) -> None:
    """ConvBERT looks at neighbouring positions, padding or not; BERT returns more than its states."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": VOCABULARY, "pad_token_id": PAD}
    for kind in ("convbert", "bert"):
        source = transformers.AutoConfig.for_model(kind, **sizes)
        target = transformers.AutoConfig.for_model("bert", **sizes, is_decoder=True, add_cross_attention=True)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(source, target)
        torch.manual_seed(0)
        model = transformers.EncoderDecoderModel(config).eval()
        model.generation_config.update(decoder_start_token_id=1, pad_token_id=PAD, eos_token_id=2, max_new_tokens=6)
        check(model, padded([7, LONG, 20, 6]), BEAM)
    assert passes == []


def test_a_decoder_that_is_not_known(passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "DECODERS", buckets.DECODERS - {"transformers.models.gpt2.modeling_gpt2"})
    check(BY_NAME["gpt2"].build(), padded(LENGTHS, "left"), BEAM)
    assert passes == []


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_layers_with_one_scale_for_all_rows(name: str, passes: list[tuple[int, int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(BY_NAME[name].build()), {torch.nn.Linear}).eval()
        check(model, padded([7, LONG, 20, 6], "right" if name == "bart" else "left"), BEAM)
    assert passes == []


@both
def test_a_hole_in_the_mask(name: str, passes: list[tuple[int, int]]) -> None:
    inputs = padded([7, LONG, 20, 6], SIDES[name])
    inputs["attention_mask"][2, 3 if name == "bart" else -3] = 0
    check(BY_NAME[name].build(), inputs, BEAM)
    assert passes == [(2, 7), (2, LONG)]


@both
def test_a_failure_in_a_group(name: str, monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, int]]) -> None:
    fastgen.enable(strict=False)

    def failing(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(buckets, "_check_nothing_else", failing)
    monkeypatch.setattr(UnpaddedForward, "_merged", failing)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(BY_NAME[name].build(), padded(LENGTHS, SIDES[name]), BEAM)
    assert passes
