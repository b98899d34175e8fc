"""Inputs that enter one captured step while others go on: the tokens of calls of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.program import Program
from fastgen.optimizer.transformers.captured.key import Host, Key, Prompt
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.equivalence.captured import KNOWN
from tests.equivalence.models import PAD
from tests.recorded_graph import RecordedGraph

NEW, PROMPT, BATCH = 24, 16, 3
HOST = Host(lambda tokens, scores: scores, lambda tokens: tokens[:, 0] < 0, lambda made: None)  # none is called


@pytest.fixture(params=["program", "graph"], autouse=True)
def captures(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu" or (request.param == "program" and graph.unavailable(device) is not None):
        pytest.skip("steps are recorded on the CPU, and programs need the compiled operators")
    made = {"program": Program, "graph": RecordedGraph}[request.param]
    monkeypatch.setattr(graph, "new", lambda device, growing=None: made())


def prefilled(model: Any, tokens: torch.Tensor, new_tokens: int, with_last: bool, beams: int) -> Prompt:
    """What is there when the first token is chosen, or (not `with_last`) when the last of the prompt is to be read."""
    length = tokens.shape[1]
    stored = length if with_last else length - 1
    with torch.no_grad():
        found = model(tokens[:, :stored], use_cache=True)
    return Prompt(
        tokens=tokens,
        new_tokens=new_tokens,
        stored=stored,
        own=[(layer.keys, layer.values) for layer in releases.cache_in(found).layers],
        cross=[],
        span=(torch.zeros(1, dtype=torch.int64), torch.tensor([stored])),
        cross_span=None,
        tensors={"attention_mask": torch.ones_like(tokens[:, :stored]), "position_ids": torch.tensor([[stored]])},
        logits=found.logits[:, -1].repeat_interleave(beams, dim=0),
    )


def step_for(prompt: Prompt, beams: int, eos: tuple[int, ...], **changes: Any) -> DecodeStep:
    sizes = changes.get("sizes", Sizes(PROMPT, PROMPT, NEW + 8, 0))
    key = {
        "batch": BATCH, "per_input": beams, "sizes": sizes, "width": 1, "encoder": None, "source_in_front": False,
        "early_stopping": None if beams == 1 else False, "samples": False, "ends": len(eos), "processors": (),
        "has_criteria": False, "kept": (), "tensors": ("attention_mask", "position_ids"),
        "constants": (("use_cache", True),), "kv": (), "windows": (None,) * len(prompt.own),
    }  # fmt: skip
    prompt.eos = eos
    return DecodeStep(Key(**(key | changes)), prompt, (), sizes)


def alone(model: Any, tokens: torch.Tensor, new_tokens: int, beams: int, eos: tuple[int, ...]) -> list[int]:
    with fastgen.disabled():
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, num_beams=beams,
            do_sample=False, eos_token_id=list(eos) or None, pad_token_id=PAD,
        )  # fmt: skip
    return found[0].tolist()


def result(step: DecodeStep, number: int) -> list[int]:
    """The best sequence of an input, without what fills it up."""
    found = step.search.results(BATCH, 1)[number].tolist()
    return [token for token in found if token >= 0]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inputs_begin_at_different_steps(name: str, beams: int, ends: bool) -> None:
    """The first begins as a call does. Others enter the graph that it has, one of them where another has been."""
    model = KNOWN[name].build()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 90, (1, length), generator=generator) for length in (7, 4, 12, 3)]
    new_tokens, places, moments = [10, 15, 24, 20], [0, 1, 2, 0], [0, 4, 6, 13]
    eos: tuple[int, ...] = ()
    if ends:  # a token that some of them come to, at different steps
        plain = [alone(model, *each, 1, ()) for each in zip(prompts, new_tokens, strict=True)]
        eos = (plain[1][prompts[1].shape[1] + 6], plain[2][prompts[2].shape[1] + 9])
    wanted = [alone(model, *each, beams, eos) for each in zip(prompts, new_tokens, strict=True)]
    assert any(len(row) < prompts[n].shape[1] + new_tokens[n] for n, row in enumerate(wanted)) == ends

    start = prefilled(model, prompts[0], new_tokens[0], True, beams)
    step = step_for(start, beams, eos)
    with torch.no_grad():
        step.begin(start, PAD)
        step.choose_first(start.logits, HOST)
        found: dict[int, list[int]] = {}
        for done in range(1, 40):
            if done in moments:
                number = moments.index(done)
                place = places[number]
                if number == 3:
                    assert not step.search.unfinished[place].any(), "the one before is over"
                    found[0] = result(step, place)
                begun = prefilled(model, prompts[number], new_tokens[number], False, beams)
                begun.eos = eos
                step.begin(begun, PAD, slice(place, place + 1))
            step.verify(model, HOST, done)
        assert step.is_captured and bool(step.search.done)
        found |= {number: result(step, places[number]) for number in (1, 2, 3)}
    for number in (1, 2, 3):
        # What the model gets: its last token is at the end of what it has, and the mask ends there.
        rows = slice(places[number] * beams, (places[number] + 1) * beams)
        last = prompts[number].shape[1] - 1 + step.buffers.position.position[rows]
        assert step.buffers.inputs["position_ids"][rows, 0].equal(last)
        assert step.buffers.inputs["attention_mask"][rows].sum(dim=1).equal(last + 1)
    for number, row in enumerate(wanted):
        length = len(row)
        assert found[number][:length] == row
        assert set(found[number][length:]) <= {PAD}


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (8, 8)},
        {"has_criteria": True},
        {"kept": ("scores",)},
        {"processors": None},
        {"tensors": ("attention_mask",)},
        {"samples": True},
        {"sizes": Sizes(PROMPT, PROMPT, 7, 0)},  # another step would take over
    ],
)
def test_inputs_that_can_only_begin_together(changes: dict[str, Any]) -> None:
    model = KNOWN["llama"].build()
    prompt = prefilled(model, torch.tensor([[5, 6, 7]]), 8, False, 1)
    step = step_for(prompt, 1, (), **changes)
    with pytest.raises(ValueError, match="only begin together"):
        step.begin(prompt, PAD, slice(0, 1))


def test_what_is_refused_changes_nothing() -> None:
    model = KNOWN["llama"].build()
    running, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10, 11]])
    wanted = alone(model, running, 12, 1, ())
    start, begun = prefilled(model, running, 12, True, 1), prefilled(model, other, NEW + 9, False, 1)
    step = step_for(start, 1, ())
    with torch.no_grad():
        step.begin(start, PAD)
        step.choose_first(start.logits, HOST)
        for done in range(1, 12):
            if done == 5:
                with pytest.raises(ValueError, match="only begin together"):  # and be exchanged for a larger one
                    step.begin(begun, PAD, slice(0, 1))
                with pytest.raises(ValueError, match="only begin together"):
                    step.begin(prefilled(model, other, 8, False, 1), PAD, slice(0, 3, 2))
            step.verify(model, HOST, done)
    assert result(step, 0) == wanted
