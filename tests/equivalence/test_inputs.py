"""Every kind of input that `generate` takes, on models that stand for the others: tokens, embeddings, caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from fastgen import releases
from tests import near_ties
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, assert_same, cache_with, check, run
from tests.equivalence.models import BY_NAME, LONG, VOCABULARY, Family
from tests.equivalence.options import SCORES, any_decoding, beam_and_sample, checked, decoders, every, seq2seq

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(5)]


@pytest.mark.parametrize("decoding", [SAMPLE, {}, {"num_beams": 3, "num_return_sequences": 3}], ids=["s", "g", "b"])
@every
def test_returned_cache_continues(family: Family, decoding: dict[str, Any]) -> None:
    """The cache that comes back is an ordinary one, with a part for the source: a second call goes on from it."""
    model, inputs = family.build(), family.make_inputs()

    def twice() -> Any:
        first = run(model, inputs, {**decoding, **SCORES, "eos_token_id": None})
        rows, length = first.sequences.shape[0] // inputs["input_ids"].shape[0], first.sequences.shape[1]
        again = {key: value.repeat_interleave(rows, 0) for key, value in inputs.items()}
        if family.encoder_decoder:
            again["decoder_input_ids"] = first.sequences
        else:
            mask = torch.nn.functional.pad(again["attention_mask"], (0, length - LONG), value=1)
            again = {"input_ids": first.sequences, "attention_mask": mask}
        again |= releases.with_cache(releases.cache_in(first))
        return first, model.generate(**again, max_new_tokens=6, return_dict_in_generate=True)

    near_ties.check(twice)
    assert accelerated() == 2


# ---- what is passed in


@any_decoding
@every
def test_ids_alone(family: Family, decoding: dict[str, Any]) -> None:
    """No attention mask; the ids by name and by position."""
    ids = family.make_inputs(padding=None)["input_ids"]
    check(family.build(), {"input_ids": ids}, {**decoding, **SCORES})
    check(family.build(), {"inputs": ids}, {**decoding, **SCORES})
    assert accelerated() == 2


@pytest.mark.parametrize("decoding", [BEAM, SAMPLE, {}], ids=["beam", "sample", "greedy"])
@decoders
def test_no_input(family: Family, decoding: dict[str, Any]) -> None:
    """From the token that begins a text."""
    check(family.build(), {}, {**decoding, **SCORES})
    assert accelerated() == 1


@any_decoding
def test_token_types(decoding: dict[str, Any]) -> None:
    family = BY_NAME["gpt2"]
    inputs = family.make_inputs()
    check(family.build(), {**inputs, "token_type_ids": inputs["input_ids"] % 5}, {**decoding, **SCORES})
    assert accelerated() == 1


@any_decoding
@decoders
def test_position_ids(family: Family, decoding: dict[str, Any]) -> None:
    """Positions of one's own."""
    positions = (torch.arange(LONG) * 2).expand(3, LONG).contiguous()
    check(family.build(), {**family.make_inputs(padding=None), "position_ids": positions}, {**decoding, **SCORES})


@decoders
@any_decoding
def test_inputs_embeds(family: Family, decoding: dict[str, Any]) -> None:
    model, inputs = family.build(), family.make_inputs()
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    without = {"inputs_embeds": embedded, "attention_mask": inputs["attention_mask"]}
    check(model, without, {**decoding, **SCORES})
    check(model, {**inputs, "inputs_embeds": embedded}, {**decoding, **SCORES})
    assert accelerated() == 2


@pytest.mark.parametrize("length", [2, 40])
@any_decoding
@seq2seq
def test_decoder_input_ids(family: Family, decoding: dict[str, Any], length: int) -> None:
    """A start of the output is given, short or long enough to be shared."""
    inputs = family.make_inputs()
    ids = torch.randint(4, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(3))
    check(family.build(), {**inputs, "decoder_input_ids": ids}, {**decoding, **SCORES})
    mask = torch.ones_like(ids)
    mask[1, : length // 2] = 0
    both_given = {**inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    check(family.build(), both_given, {**decoding, **SCORES})
    assert accelerated() == 2


@any_decoding
@seq2seq
def test_encoder_outputs(family: Family, decoding: dict[str, Any]) -> None:
    """The encoder has run already; the object that the caller holds afterwards is as after an original call."""
    model, inputs = family.build(), family.make_inputs()
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs, output_hidden_states=True)
    mask = inputs["attention_mask"]

    def call() -> Any:
        mine = copy.deepcopy(encoded)
        torch.manual_seed(0)
        return model.generate(encoder_outputs=mine, attention_mask=mask, **decoding, **SCORES), mine

    near_ties.check(call)
    assert accelerated() == 1


@pytest.mark.parametrize("knows_model", [False, True], ids=["plain", "for-the-model"])
@any_decoding
@every
def test_own_empty_cache(family: Family, decoding: dict[str, Any], knows_model: bool) -> None:
    """A cache that the caller made holds the same after the call."""
    model = family.build()

    def make() -> Any:
        return DynamicCache(config=model.config.get_text_config(decoder=True)) if knows_model else DynamicCache()

    def call() -> Any:
        cache = transformers.EncoderDecoderCache(make(), make()) if family.encoder_decoder else make()
        return run(model, family.make_inputs(), lambda: {**decoding, **releases.with_cache(cache)}), cache

    near_ties.check(call)
    assert accelerated() == 1


@pytest.mark.parametrize("prefix", [5, 40])
@any_decoding
@decoders
def test_own_filled_cache(family: Family, decoding: dict[str, Any], prefix: int) -> None:
    """The caller has run a part of the prompt already, with one row per sequence."""
    model, inputs = family.build(), family.make_inputs(padding=None)
    rows = max(decoding.get("num_beams", 1), decoding.get("num_return_sequences", 1))

    def call() -> Any:
        cache = cache_with(model, inputs["input_ids"][:, :prefix], DynamicCache())
        cache.batch_repeat_interleave(rows)
        return run(model, inputs, lambda: {**decoding, **SCORES, **releases.with_cache(cache)}), cache

    near_ties.check(call)
    assert accelerated() == 1


@pytest.mark.parametrize("size", [7, 16, 100])
@beam_and_sample
@decoders
def test_prefill_chunk_size(family: Family, decoding: dict[str, Any], size: int) -> None:
    checked(family, decoding, {"prefill_chunk_size": size})


@every
def test_inputs_are_left_alone(family: Family) -> None:
    """Tensors and options that are passed in are not changed."""
    inputs = family.make_inputs()
    options = {**BEAM, **SCORES, "bad_words_ids": [[7], [12, 13]]}
    before = copy.deepcopy((inputs, options))
    family.build().generate(**inputs, **options)
    assert_same(before, (inputs, options))
