"""What may differ between two float32 results, and what is a fault. Each is planted here."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgen
from fastgen import releases
from tests import near_ties
from tests.equivalence.check import run
from tests.equivalence.models import BY_NAME

GPT2 = BY_NAME["gpt2"]
BEAM = {"num_beams": 4}
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True}
NO_TIE = "No near-tie explains it"


@pytest.fixture(autouse=True)
def reported(near_ties_are_counted: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was reported as a near-tie. It is kept out of the counts of the test run."""
    found: list[str] = []
    monkeypatch.setattr(near_ties, "report", found.append)
    monkeypatch.setattr(near_ties, "MOST_RUNS", 20)
    return found


@functools.cache
def twins(apart: float, exchanged: bool) -> Any:
    """A model that often says one of two words, whose scores differ by a part of themselves; or the same, exchanged."""
    model = copy.deepcopy(GPT2.build())
    with torch.no_grad():
        head = model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        words = [head[50] * 5, head[50] * 5 * (1 + apart)]
        head[50], head[90] = words[::-1] if exchanged else words
    return model


def caller(model: Any, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        with fastgen.disabled():
            return run(model, GPT2.make_inputs(), {**EVERYTHING, "max_new_tokens": 6, **options})

    return call


def settle(call: Callable[[], Any], original: Any, ours: Any) -> None:
    with pytest.raises(AssertionError) as difference:
        near_ties.assert_same(original, ours)
    near_ties.settle(call, original, ours, difference.value)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "max_new_tokens": 2}], ids=["greedy", "beams"])
def test_one_of_two_candidates(options: dict[str, Any], reported: list[str]) -> None:
    """Which of them is taken may differ if rounding decides, and only then."""
    for apart in (3e-7, 1e-2):
        call, other = (caller(twins(apart, exchanged), **options) for exchanged in (False, True))
        if apart < 1e-6:
            settle(call, call(), other())
            assert reported
        else:
            with pytest.raises(AssertionError, match=NO_TIE):
                settle(call, call(), other())


def test_a_wrong_token() -> None:
    call = caller(GPT2.build())
    original, ours = call(), call()
    ours.sequences[1, -1] += 1
    with pytest.raises(AssertionError, match=NO_TIE):
        settle(call, original, ours)


def test_a_wrong_token_where_another_is_nearly_a_tie() -> None:
    """A near-tie excuses what follows from it, and nothing else."""
    call, other = (caller(twins(3e-7, exchanged)) for exchanged in (False, True))
    ours = other()
    ours.sequences[1, -1] += 1
    with pytest.raises(AssertionError, match=NO_TIE):
        settle(call, call(), ours)


def test_exchanged_rows() -> None:
    call = caller(GPT2.build(), **BEAM)
    original, ours = call(), call()
    for layer in releases.cache_in(ours).layers:
        layer.keys, layer.values = layer.keys.flip(0), layer.values.flip(0)
    with pytest.raises(AssertionError, match=NO_TIE):
        settle(call, original, ours)


@pytest.mark.parametrize("decoding", ["sequences_scores", "scores"])
def test_wrong_numbers(decoding: str) -> None:
    call = caller(GPT2.build(), **BEAM)
    original, ours = call(), call()
    numbers = ours[decoding] if decoding == "sequences_scores" else ours.scores[3]
    numbers += 3e-4
    with pytest.raises(AssertionError, match=NO_TIE):
        settle(call, original, ours)


def test_numbers_are_compared_relatively() -> None:
    near_ties.assert_same(torch.tensor([619.0]), torch.tensor([619.002]))
    for wrong in (torch.tensor([619.02]), torch.tensor([-torch.inf])):
        with pytest.raises(AssertionError):
            near_ties.assert_same(torch.tensor([619.0]), wrong)
    with pytest.raises(AssertionError):
        near_ties.assert_same(torch.tensor([0.5]), torch.tensor([0.5003]))


@pytest.mark.parametrize(("beside", "passes"), [(2e-7, True), (1e-3, False)], ids=["rounding", "more"])
def test_the_edge_of_top_p(beside: float, passes: bool, reported: list[str]) -> None:
    """A candidate that is left out on one side only."""
    logits = caller(GPT2.build(), do_sample=True, top_k=0, max_new_tokens=1)().scores[0]
    edge = float(logits[0].double().softmax(0).sort().values.cumsum(0)[80])

    def of(shift: float) -> Callable[[], Any]:
        return caller(GPT2.build(), do_sample=True, top_k=0, top_p=1 - edge + shift, max_new_tokens=1)

    call, original, ours = of(beside), of(beside)(), of(-beside)()
    assert (original.scores[0].isinf() != ours.scores[0].isinf()).any()
    if passes:
        settle(call, original, ours)
        assert "a limit" in reported[0]
    else:
        with pytest.raises(AssertionError, match=NO_TIE):
            settle(call, original, ours)


def test_float64_finds_what_float32_does() -> None:
    """From the same random numbers, whatever kind of products the model has."""
    for family in (BY_NAME[name] for name in ("t5", "mixtral")):
        for options in ({"do_sample": True}, {**BEAM, "do_sample": True}):
            with fastgen.disabled():
                single = run(family.build(), family.make_inputs(), {**options, "return_dict_in_generate": True})
                with near_ties.InFloat64() as search:
                    double = run(family.build(), family.make_inputs(), {**options, "return_dict_in_generate": True})
            assert search.depth > 5 and search.magnitude > 1
            assert near_ties.distance(near_ties.in_float32(double), single, 1e-4).differing == 0


def test_numbers_as_text_are_compared_as_numbers():
    near_ties.assert_same([["0.346938", "0.2"]], [["0.346939", "0.2"]])
    with pytest.raises(AssertionError):
        near_ties.assert_same([["0.346938"]], [["0.347938"]])
    with pytest.raises(AssertionError):
        near_ties.assert_same([["0.346938"]], [["none"]])
