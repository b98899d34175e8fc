"""Speculative decoding against the original code: the same tokens, whatever drafts, and however much of it is right."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.models import fsmt

import fastgen
from fastgen import settings
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.row_lengths import RowLengths
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.layers import FastLayers
from fastgen.decoding.speculation.draft_length import DraftLength
from fastgen.optimizer.transformers.call import fast_layers
from fastgen.optimizer.transformers.captured import decoding, graph_cache, sizes
from fastgen.optimizer.transformers.speculation.drafting import LENGTHS
from tests import near_ties
from tests.equivalence.check import check
from tests.equivalence.models import EOS, LONG, SHORT, VOCABULARY, Weights, enliven
from tests.equivalence.others import made
from tests.equivalence.speculation import (
    DRAFTS,
    EARLY_EXIT,
    GREEDY,
    KNOWN,
    assert_speculates,
    counts,
    disturbed,
    draft_of,
    same,
    speculates,
)
from tests.noting import noted

pytestmark = [pytest.mark.usefixtures("speculates_at_once"), pytest.mark.sampled(6)]
DECODERS = ["llama", "gpt2", "bloom", "qwen2", "gemma", "opt", "gpt-neox", "mixtral"]
WITH_ENCODER = ["bart", "t5", "marian", "whisper", "m2m100"]


CASES = [(name, draft) for draft in DRAFTS for name in (*DECODERS, *WITH_ENCODER)]


@pytest.mark.parametrize(
    ("name", "draft"), [each for each in CASES if each[1] != "early exit" or each[0] in EARLY_EXIT]
)
def test_same_tokens(name: str, draft: str, any_lengths: None) -> None:
    """Models that compute positions from the length of the cache among them: it is another one for each row."""
    family = KNOWN[name]
    model = family.build()
    asked = draft_of(draft, model)
    for batch, length in ((1, LONG), (3, SHORT), (3, LONG)):
        same(model, family.make_inputs(batch, length), GREEDY, **asked)
    assert_speculates(3)
    found, kept = counts(), graph_cache._models[model]
    # What is looked up need not be there. Of other drafts, what comes behind an end, or a row that is behind, is wrong.
    least = {"int8": 0.5, "assistant": 0.1}.get(draft, -1.0)
    assert draft == "lookup" or found["accepted"] > least * found["drafted"] != 0
    assert not kept.refused and all(not key.draft.together for key in kept.steps)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_drafts_chosen_by_what_they_gain(name: str) -> None:
    speculates(name, "int4", batches=(2, 2, 5))


def test_an_identical_assistant_is_always_right(any_lengths: None) -> None:
    family = KNOWN["llama"]
    model = family.build()
    inputs = family.make_inputs(3)
    options = {**GREEDY, "eos_token_id": None}
    for _ in range(3):
        same(model, inputs, options, assistant_model=copy.deepcopy(model))
    assert counts()["accepted"] == counts()["drafted"] > 0


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.usefixtures("tests_are_the_librarys")
def test_an_assistant_has_an_encoder_of_its_own(
    name: str, padding: str | None, any_lengths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is run once in each call; the model's is not asked by it. What it says is right up to rounding."""
    model, inputs = made(name, 3, LONG, padding)
    assistant, options = copy.deepcopy(model), {**GREEDY, "eos_token_id": None}
    runs = noted(monkeypatch, assistant.get_encoder(), "forward")
    for _ in range(3):
        same(model, inputs, options, assistant_model=assistant)
    assert_speculates(3)
    assert len(runs) == 3
    assert counts()["accepted"] > 0.9 * counts()["drafted"] > 0


def test_an_assistant_with_a_prompt_of_the_decoder(any_lengths: None) -> None:
    model, inputs = made("bart", 3, SHORT)
    inputs["decoder_input_ids"] = torch.randint(4, VOCABULARY, (3, 3), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        same(model, inputs, GREEDY, assistant_model=disturbed(model, 0.01))
    assert_speculates(2)


def test_an_encoders_output_that_is_given_is_left_to_the_library(any_lengths: None) -> None:
    """The assistant's encoder has nothing to read then."""
    model, inputs = made("bart", 1, SHORT)
    with fastgen.disabled(), torch.no_grad():
        encoded = model.get_encoder()(**inputs)

    def outcome() -> Any:
        given = {"encoder_outputs": copy.deepcopy(encoded), "attention_mask": inputs["attention_mask"]}
        try:
            return model.generate(**given, **GREEDY, assistant_model=disturbed(model, 0.01)).tolist()
        except Exception as error:
            return repr(error)

    with fastgen.disabled():
        wanted = outcome()
    assert outcome() == wanted
    assert counts()["accelerated"] == 0


@pytest.mark.parametrize("threshold", [0.5, 1.1])
def test_an_assistant_that_stops_where_it_is_in_doubt(threshold: float, any_lengths: None) -> None:
    """`assistant_confidence_threshold`; above 1 each draft ends with its first token."""
    family = KNOWN["llama"]
    model = family.build()
    assistant = disturbed(model, 0.05)
    assistant.generation_config.assistant_confidence_threshold = threshold
    for batch in (1, 3, 3):
        same(model, family.make_inputs(batch), GREEDY, assistant_model=assistant)
    assert_speculates(3)
    found, rows = counts(), 3
    if threshold > 1:
        assert 0 < found["drafted"] <= rows * found["verifies"]
    else:
        assert found["drafted"] > 0


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_schedules(schedule: str) -> None:
    """As in the library, "heuristic" leaves in the assistant what it has come to."""
    family = KNOWN["llama"]
    model = family.build()
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    lengths = []
    for _ in range(2):
        same(model, family.make_inputs(2), GREEDY, assistant_model=assistant)
        lengths.append(assistant.generation_config.num_assistant_tokens)
    assert_speculates(2)
    assert lengths == [4, 4] if schedule != "heuristic" else 4 < lengths[0] < lengths[1]


def test_rows_together_where_a_length_of_each_cannot_be(any_lengths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call finds out, and goes on without a draft."""

    def fails(*args: Any) -> Any:
        raise CannotBeCaptured("planted")

    monkeypatch.setattr(RowLengths, "_for_each_row", fails)
    family = KNOWN["bart"]
    fastgen.enable(self_speculation="int8")
    for _ in range(3):
        same(family.build(), family.make_inputs(4), GREEDY)
    assert counts()["accelerated"] == 2 and counts()["not used"] == {"planted": 1}
    found = [key.draft for key in graph_cache._models[family.build()].steps if key.draft is not None]
    assert found and all(draft.together for draft in found)


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 15},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [9, 11]]},
        {"suppress_tokens": [5, 6], "begin_suppress_tokens": [8]},
        {"max_new_tokens": 9},
        {"max_new_tokens": 80},
        {"eos_token_id": list(range(2, 30))},
        {"num_return_sequences": 1, "forced_eos_token_id": EOS},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_options(name: str, options: dict[str, Any], any_lengths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_MAX_FIRST_NEW_ON_CPU", 13)
    monkeypatch.setattr(sizes, "_NEW_ON_CPU", (13, 3))
    speculates(name, "int8", options)


def test_returned_cache(any_lengths: None) -> None:
    """Where sequences end one by one, nothing is drafted: the library stores what follows the end of each."""
    family = KNOWN["llama"]
    fastgen.enable(self_speculation="int8")
    for batch in (1, 1, 3):
        same(family.build(), family.make_inputs(batch), {**GREEDY, "return_dict_in_generate": True})
    assert counts()["accelerated"] == 2
    assert counts()["not used"] == {"a returned cache of sequences that end one by one": 1}


def test_a_changed_weight_is_drafted_with(any_lengths: None) -> None:
    family = KNOWN["llama"]
    model = copy.deepcopy(family.build())
    fastgen.enable(self_speculation="int8")
    for _ in range(3):
        same(model, family.make_inputs(2), GREEDY)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
    assert counts()["accepted"] > 0.5 * counts()["drafted"] > 0
    assert len(graph_cache._models[model].steps) == 1  # those with the weights of before are freed


def test_what_is_left_to_others() -> None:
    """Beams and attentions: the tokens are those of the library all the same."""
    family = KNOWN["llama"]
    model, inputs = family.build(), family.make_inputs(2)
    fastgen.enable(self_speculation="int8")
    same(model, inputs, {**GREEDY, "num_beams": 3})
    recorded = {**GREEDY, "output_hidden_states": True, "return_dict_in_generate": True}
    same(model, inputs, recorded)
    fastgen.enable(self_speculation="off")
    same(model, family.make_inputs(1), {**GREEDY, "output_hidden_states": True}, prompt_lookup_num_tokens=3)
    assert counts()["accelerated"] == 0
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"assisted decoding": 1}


@pytest.mark.parametrize("draft", ["lookup", "assistant"])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"guidance_scale": 1.5},
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 11])},
        lambda: {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, KNOWN["llama"].build())]},
    ],
    ids=["guidance", "watermark", "processor"],
)
def test_processors_that_remember_what_was_drafted(options: Callable[[], dict[str, Any]], draft: str) -> None:
    """With the library's drafts, their scores are others than without."""
    drafts = {"prompt_lookup_num_tokens": 3} if draft == "lookup" else {"assistant_model": KNOWN["qwen2"].build()}
    check(KNOWN["llama"].build(), KNOWN["llama"].make_inputs(1), lambda: {**GREEDY, **drafts, **options()})
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"assisted decoding": 1}


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_static_cache_is_left_to_the_library(name: str) -> None:
    """Whether it drafts with one, and compiles, depends on the release. A model with an encoder may be refused."""
    family = KNOWN[name]
    options = {**GREEDY, "prompt_lookup_num_tokens": 3, "cache_implementation": "static"}

    def outcome() -> Any:
        model = copy.deepcopy(family.build())  # it keeps the cache
        try:
            return model.generate(**family.make_inputs(1, SHORT), **options).tolist()
        except (TypeError, ValueError) as error:
            return type(error)

    with fastgen.disabled():
        expected = outcome()
    fastgen.reset_stats()
    assert outcome() == expected
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"assisted decoding": 1}


@pytest.mark.parametrize("draft", ["self-draft", "assistant"])
def test_a_model_is_freed(draft: str) -> None:
    """What is recorded keeps neither the model nor its assistant."""
    family = KNOWN["llama"]
    model = copy.deepcopy(family.build())
    assistant = copy.deepcopy(model) if draft == "assistant" else None
    fastgen.enable(self_speculation="off" if assistant is not None else "int8")
    for _ in range(3):
        model.generate(**family.make_inputs(2), **GREEDY, assistant_model=assistant)
    assert_speculates(3)
    references = [weakref.ref(each) for each in (model, assistant) if each is not None]
    del model, assistant
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_up_to_the_last_position_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is ahead of others drafts behind its limit, where the model may have no position."""

    def choose(self: DraftLength, rows: Any, most: int, available: Any = None) -> int:
        return max(length for length in LENGTHS if length <= most)

    monkeypatch.setattr(DraftLength, "choose", choose)
    family = KNOWN["whisper"]
    config = copy.deepcopy(family.build().config)
    config.max_target_positions = 32
    model = type(family.build())(config).eval()
    enliven(model, family.weights)
    model.generation_config = copy.deepcopy(family.build().generation_config)
    model.generation_config.eos_token_id = None
    fastgen.enable(self_speculation="int4")
    for _ in range(2):
        same(model, family.make_inputs(5), {**GREEDY, "max_new_tokens": 31, "eos_token_id": None})
    assert_speculates(2)


def test_lookup_up_to_the_last_position_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of a check that are left over are behind the limit, too."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, rows, most, available: 7 if max(available) else 0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    enliven(model, Weights(1))
    tokens = torch.tensor([[5, 6, 7, 8, 9] * 8])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    for _ in range(2):
        same(model, inputs, {**GREEDY, "max_new_tokens": 24}, prompt_lookup_num_tokens=8)
    assert_speculates(2)


def test_an_assistant_that_has_not_drafted_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then rows that have ended are behind what the assistant lacks, and their prompt is short."""
    lengths = itertools.cycle([0] * 12 + [3])

    def choose(self: DraftLength, rows: Any, most: int, available: Any = None) -> int:
        return next(lengths) if most >= 3 else 0

    monkeypatch.setattr(DraftLength, "choose", choose)
    family = KNOWN["gpt2"]
    model = family.build()
    tokens = torch.tensor([[11], [12]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    options = {**GREEDY, "max_new_tokens": 30, "eos_token_id": None}
    with fastgen.disabled():
        first, second = model.generate(**inputs, **options).tolist()
    ends = next(token for token in first[1:5] if token not in second)
    for _ in range(2):
        same(model, inputs, {**options, "eos_token_id": ends}, assistant_model=copy.deepcopy(model))
    assert_speculates(2)
    assert counts()["accepted"] > 0


def test_a_check_that_fails_is_not_tried_again() -> None:
    """Drafts have been recorded by then. The model takes one token at a time."""
    family = KNOWN["prophetnet"]
    model = family.build()
    fastgen.enable(self_speculation="int8")
    for _ in range(3):
        same(model, family.make_inputs(2), GREEDY)
    assert [key.draft.together for key in graph_cache._models[model].refused] == [False, True]


def test_lookup_with_rows_that_fill_the_batch_up(any_lengths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(decoding.Decoding, "_batch", lambda self, inputs: 4)
    speculates("bart", "lookup")


def test_tokens_that_only_the_encoder_has(any_lengths: None) -> None:
    family = KNOWN["fsmt"]
    config = copy.deepcopy(family.build().config)
    config.src_vocab_size = VOCABULARY + 200
    config.tie_word_embeddings = False
    model = type(family.build())(config).eval()
    enliven(model, family.weights)
    model.generation_config = copy.deepcopy(family.build().generation_config)
    inputs = family.make_inputs(2)
    with fastgen.disabled():
        said = model.generate(**inputs, **GREEDY)[:, 1:9]
    # What the model says is in its source, and then something that it cannot say.
    for row, tokens in enumerate(said.tolist()):
        source = torch.tensor([[token, VOCABULARY + 9] for token in tokens]).flatten()
        inputs["input_ids"][row, : len(source)] = source
    for _ in range(2):
        same(model, inputs, GREEDY, prompt_lookup_num_tokens=4)
    if "input_ids = input_ids[:, -1:]" in inspect.getsource(fsmt.modeling_fsmt):
        pytest.skip("FSMT reads the last token alone in this release")
    assert_speculates(2)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [42, 50])
def test_frequencies_that_depend_on_the_longest_sequence(kind: str, length: int, any_lengths: None) -> None:
    """A check of several positions would compute with those of the last one. Trying one leaves the model changed."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 48}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=48 if kind == "dynamic" else 200, eos_token_id=None, rope_parameters=rope,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    enliven(model, KNOWN["llama"].weights)
    tokens = torch.randint(4, VOCABULARY, (3, 2), generator=torch.Generator().manual_seed(1)).repeat(1, length // 2)
    for draft in ({}, {"prompt_lookup_num_tokens": 8}):

        def run(draft: dict[str, Any] = draft) -> Any:
            asked = draft if fastgen.patching.is_active() else {}
            # A copy: the library's own next call differs, too.
            return copy.deepcopy(model).generate(tokens, **{**GREEDY, "max_new_tokens": 12}, **asked)

        near_ties.check(run)
    assert counts()["accelerated"] == 0
    reason = "a model whose results depend on what else is in the batch"
    assert kind == "dynamic" or reason in counts()["not used"]  # the former has no captured step at all


def test_an_assistants_layers_are_waited_for_before_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has them in another form, and may wait for the turn itself."""
    family = KNOWN["llama"]
    model, assistant = family.build(), copy.deepcopy(family.build())
    waits, goes_on, is_free = threading.Event(), FastLayers._freed.wait, []
    monkeypatch.setattr(FastLayers._freed, "wait", lambda *given: (waits.set(), goes_on(*given))[1])
    with settings.changed(packed_weights="never"):
        layers = fast_layers(assistant)
        layers.__enter__()
    options = {**GREEDY, "assistant_model": assistant}
    found: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: found.append(model.generate(**family.make_inputs(2), **options)))
    caller.start()
    try:
        assert waits.wait(30)
        turn = graph._turn_of(model.device)
        is_free.append(turn.acquire(blocking=False))
        if is_free[0]:
            turn.release()
    finally:
        layers.__exit__()
        caller.join()
    assert is_free == [True]
    assert_speculates(1)
    assert torch.equal(found[0], model.generate(**family.make_inputs(2), **GREEDY))
