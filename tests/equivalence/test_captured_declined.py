"""Calls without a captured step: what is declined, and what goes on without when a capture fails."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import fastgen
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.part import CapturedPart
from tests.equivalence.captured import (
    BEAMS,
    GREEDY,
    KNOWN,
    NEW,
    Counting,
    build,
    captures,
    reasons,
    to,
    two,
)
from tests.equivalence.check import check, run
from tests.equivalence.models import BY_NAME, Family

DECLINED = {
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True, "output_scores": True},
    "only a few tokens to generate": {"max_new_tokens": 4},
    "a max_length that is no integer": {"num_beams": 1, "max_new_tokens": 20.5},
    "low_memory": {"num_beams": 1, "low_memory": True},
}


@pytest.mark.parametrize(("reason", "options"), DECLINED.items(), ids=DECLINED)
def test_declined(reason: str, options: dict[str, Any], device: torch.device) -> None:
    """The call goes on as if there were no captured step, and the reason is counted."""
    model, inputs = build(BY_NAME["t5"], device)
    fastgen.enable(strict=True)  # no fallback: the call is accelerated
    check(model, inputs, {**BEAMS, **options})
    assert reasons() == {reason: 1} and captures() == 0


def test_an_option_of_beam_search_that_is_no_more(device: torch.device) -> None:
    """The library refuses it in its loop, whether or not a step is captured."""
    model, inputs = build(BY_NAME["bart"], device)
    with pytest.raises(ValueError, match="low_memory"):
        run(model, inputs, {**BEAMS, "low_memory": True})
    assert captures() == 0


def test_a_list_of_no_end_tokens(device: torch.device) -> None:
    """Where the padding is token 0, the library's loop wants the first of them."""
    model, inputs = build(BY_NAME["bart"], device)
    with pytest.raises(IndexError, match="out of bounds"):
        run(model, inputs, {**BEAMS, "eos_token_id": [], "pad_token_id": 0})
    check(model, inputs, {**BEAMS, "eos_token_id": [], "pad_token_id": 1})
    assert captures() == 0


def test_a_criterion_that_fills_up(device: torch.device) -> None:
    """The library looks for the attribute, and pads what has ended then."""
    model, inputs = build(BY_NAME["gpt2"], device)

    class Ends(EosTokenCriteria):
        pass

    criteria = StoppingCriteriaList([Ends(torch.tensor(11, device=device))])
    check(model, inputs, {**GREEDY, "stopping_criteria": criteria})
    assert reasons() == {"the stopping criterion Ends": 1}


def test_a_criterion_for_a_larger_length(device: torch.device) -> None:
    """It takes the place of the library's."""
    model, inputs = build(BY_NAME["bart"], device)
    options = {**GREEDY, "min_new_tokens": 40, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(35)])}
    found = check(model, inputs, options)
    assert found.shape[1] == 35
    assert reasons() == {"a criterion for a larger length than max_length": 1}


def test_a_mask_with_holes(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    inputs["attention_mask"][:, 1] = 0
    inputs["attention_mask"][:, 0] = 1
    check(model, inputs, BEAMS)
    assert reasons() == {"a mask with holes": 1}


@two
def test_an_input_that_is_masked_altogether(family: Family, device: torch.device) -> None:
    model, inputs = build(family, device)
    inputs["attention_mask"][1] = 0
    check(model, inputs, BEAMS)
    assert reasons() == {"an input that is masked altogether": 1}


def test_a_model_that_counts_the_keys(device: torch.device) -> None:
    """GPT-Neo finds its local window by the number of keys, also in a call that ends before anything is captured."""
    kind = transformers.GPTNeoConfig(
        vocab_size=100, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=128, initializer_range=0.6, bos_token_id=1,
        eos_token_id=list(range(100)),
    )  # fmt: skip
    model = transformers.GPTNeoForCausalLM(kind).eval().to(device)
    ids = torch.randint(3, 99, (2, 20), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {**GREEDY, "min_new_tokens": 2, "pad_token_id": 0}
    check(model, inputs, lambda: {**options, "logits_processor": LogitsProcessorList([Counting()])})
    assert reasons() == {"a model that the library does not run with a static cache": 1}


def test_never(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    fastgen.enable(captured_step="never")
    check(model, inputs, BEAMS)
    assert captures() == 0 and reasons() == {}


@two
@pytest.mark.parametrize("which", ["first step", "capture"])
def test_a_step_that_cannot_be_captured(
    family: Family, which: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's loop takes over from the prefill, and it is not tried again."""
    model, inputs = build(family, device)
    tries = []

    def fail(*args: Any) -> None:
        tries.append(None)
        raise RuntimeError("planted")

    if which == "capture":
        monkeypatch.setattr(graph.Graph, "capture", fail)
    else:
        monkeypatch.setattr(CapturedPart, "run", fail)
    for _ in range(2):
        check(model, inputs, BEAMS)
    (reason,) = reasons()
    assert "planted" in reason and reasons() == {reason: 2} and captures() == 0
    assert len(tries) == 1
    monkeypatch.undo()


def test_sampling_goes_on_from_the_same_random_state(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.Graph, "capture", lambda *args: 1 / 0)
    model, inputs = build(BY_NAME["gpt2"], device)
    check(model, inputs, {**NEW, "do_sample": True})
    (reason,) = reasons()
    assert "ZeroDivisionError" in reason


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_a_model_that_reads_the_encoders_output(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not stored with K and V; the NaN in its place are seen in the first step."""
    model, inputs = build(BY_NAME["bart"], device)
    forward = model.forward

    def reading(*args: Any, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        outputs = forward(*args, encoder_outputs=encoder_outputs, **kwargs)
        outputs.logits = outputs.logits + encoder_outputs[0].mean()
        return outputs

    monkeypatch.setattr(type(model), "forward", lambda self, *args, **kwargs: reading(*args, **kwargs))
    type(model).forward.__module__ = "transformers.models.bart.modeling_bart"
    run(model, inputs, BEAMS)
    (reason,) = reasons()
    assert "encoder's output" in reason


def test_autocast(device: torch.device) -> None:
    """It keeps copies of weights, which are gone when it ends."""
    model, inputs = build(BY_NAME["bart"], device)
    with torch.autocast(device.type, torch.bfloat16):
        run(model, inputs, BEAMS)
    assert reasons() == {"autocast": 1}
    check(model, inputs, BEAMS)
    assert captures() == 1


def test_samples_of_what_is_no_probability(device: torch.device) -> None:
    """The original code says so."""
    model, inputs = build(BY_NAME["llama"], device)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    message = "probability tensor contains either"
    if device.type == "cuda":
        pytest.skip("there, the original code's error ends the process")
    for beams in (1, 3):
        with pytest.raises(RuntimeError, match=message):
            run(model, inputs, {**NEW, "do_sample": True, "num_beams": beams})


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_positions_for_all_sequences_together(options: dict[str, Any], device: torch.device) -> None:
    """One row of them, which the model repeats: that of a batch is none of a step's buffers."""
    model, inputs = build(BY_NAME["llama"], device)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    positions = torch.arange(inputs["input_ids"].shape[1], device=device)[None] + 3
    check(model, {**inputs, "position_ids": positions}, {**GREEDY, "min_new_tokens": 24})
    assert reasons() == {"the model's input position_ids is not one row for each sequence": 1} and not captures()
    check(model, {**inputs, "position_ids": positions.expand(len(inputs["input_ids"]), -1)}, {**GREEDY, **options})
    assert captures() == 1, reasons()


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_model_that_drops_its_cache(options: dict[str, Any], device: torch.device) -> None:
    """Phi-3 reads all tokens again where the frequencies of short sequences give way to those of long ones."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = KNOWN["phi3"].config | {"original_max_position_embeddings": 24, "rope_parameters": rope}
    family = dataclasses.replace(KNOWN["phi3"], name="phi3-long", config=config)
    model, ending = copy.deepcopy(family.build()).to(device), {"min_new_tokens": 24}
    check(model, to(device, family.make_inputs(length=9)), {**options, **ending})
    assert captures() == 0 and "where the sequence gets long" in next(iter(reasons()))
    check(model, to(device, family.make_inputs(length=24)), {**options, **ending})
    assert captures() == 0
    check(model, to(device, family.make_inputs(length=9)), {**options, "max_new_tokens": 12})
    waits = any("waits for the device" in reason for reason in reasons())  # older releases ask how long sequences are
    assert captures() == (not waits)
    check(model, to(device, family.make_inputs(length=25)), {**options, **ending})  # long from the beginning
    assert sum(count for reason, count in reasons().items() if "gets long" in reason) == 2
