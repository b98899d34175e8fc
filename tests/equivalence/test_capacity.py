"""One recording serves prompts and continuations of all lengths: the K/V cache grows under it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from fastgen.decoding.captured.program import Program
from fastgen.optimizer.transformers.captured import key
from fastgen.optimizer.transformers.captured.pays import Ledger
from tests.equivalence.captured import (
    BY_RELEASE,
    FAMILIES,
    KNOWN,
    Counting,
    build,
    captures,
    every,
    reasons,
    record_from,
    record_programs,
)
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import EOS, LONG, SHORT, Family
from tests.equivalence.test_captured import NOT_ACCELERATED, NOT_CAPTURED
from tests.noting import noted

pytestmark = pytest.mark.sampled(8)

CPU = torch.device("cpu")
# (inputs, length of the prompt or source, new tokens): none like another, up and down.
LENGTHS = [(3, 20, 12), (3, LONG, 30), (2, 5, 50), (3, 170, 9), (3, 30, 90)]
WAYS = {
    "greedy": {"do_sample": False, "num_beams": 1},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7},
    "samples": {"do_sample": True, "num_beams": 1},
    "beam samples": {"do_sample": True, "num_beams": 2},
    "repeats": {"do_sample": False, "num_beams": 2, "repetition_penalty": 1.3, "bad_words_ids": [[7], [9, 11]]},
}
# Models with tensors of a step that have as many elements as the cache: their recordings are for one size of it. So are
# those with processors that read the tokens.
BOUND = {"t5"}  # the attention bias of all positions
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


@pytest.fixture(autouse=True)
def recordings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that are recorded. They are for the first call already, with small buffers that have to grow."""
    record_programs(device, monkeypatch)
    monkeypatch.setattr(key, "_CACHED_ON_CPU", (32, 1))
    monkeypatch.setattr(key, "_NEW_ON_CPU", (32, 3))
    monkeypatch.setattr(key, "_SOURCE_ON_CPU", (32, 5))
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 30)
    return noted(monkeypatch, Program, "capture", lambda program, function: program)


def of_length(family: Family, inputs: int, length: int) -> dict[str, Any]:
    return family.make_inputs(inputs, length)


@every
@ways
def test_one_recording_for_all_lengths(
    family: Any, way: dict[str, Any], recordings: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "with_more_rows", lambda self, *asked, **more: None)
    model, _ = build(family, CPU)
    for inputs, length, new in LENGTHS:
        length = min(length, family.config.get("n_positions", 4096) - new)
        check(model, of_length(family, inputs, length), {**way, "max_new_tokens": new, "min_new_tokens": new // 2})
    assert captures() == len(LENGTHS), reasons()
    is_bound = family.name in BOUND or "repetition_penalty" in way
    assert all(each.follows for each in recordings) == (not is_bound)
    if not is_bound:
        assert len(recordings) == 2  # of two and of up to four inputs


@every
def test_one_row_goes_on_in_larger_buffers(family: Any, recordings: list[Program]) -> None:
    """Its K and V are written at one position, for which there is another operator."""
    model, _ = build(family, CPU)
    for new in (12, 60, 20, 160):
        new = min(new, family.config.get("n_positions", 4096) - 20)
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": 1}
        check(model, of_length(family, 1, 20), given)
    if family.name not in BOUND:
        assert len(recordings) == 1 and recordings[0].follows


@pytest.mark.sampled(20)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in NOT_ACCELERATED])
def test_every_model_from_its_first_steps_on(name: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that may end at any token: steps as they are, a recording, and buffers that grow under it; then a longer
    prompt.
    """
    record_from(monkeypatch, 20)
    model, _ = build(KNOWN[name], CPU)
    model.generation_config.forced_eos_token_id = None
    for length in (SHORT, LONG):
        options = {"max_new_tokens": 60, "do_sample": False, "num_beams": beams, "suppress_tokens": [EOS]}
        check(model, KNOWN[name].make_inputs(2, length), options)
    # Calls that the original code runs, those beyond a sliding window, have no captured step either.
    assert name in BY_RELEASE or captures() == (0 if name in NOT_CAPTURED else accelerated()), reasons()
    assert accelerated() == 2 or KNOWN[name].config.get("sliding_window", 4096) <= LONG + 60


def test_a_table_of_positions_that_is_shorter_than_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models ask whether it is long enough, which what the call asks for decides, and not for what there is room."""
    monkeypatch.setattr(key, "_NEW_ON_CPU", (2000, 3))
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 2000)
    model, inputs = build(KNOWN["m2m100"], CPU)
    for new in (12, 20):
        check(model, inputs, {"max_new_tokens": new, "do_sample": False, "num_beams": 2})
    assert captures() == 2, reasons()


@every
@ways
def test_users_code_and_growth(family: Any, way: dict[str, Any]) -> None:
    """Also where the larger step is captured without a first token of its own."""
    model, inputs = build(family, CPU)

    def options(new: int) -> dict[str, Any]:
        code = {"logits_processor": [Counting()], "stopping_criteria": [lambda tokens, scores: tokens[:, -1] % 31 == 3]}
        return {**way, **code, "max_new_tokens": new, "output_scores": True, "return_dict_in_generate": True}

    for new in (20, 70):
        check(model, inputs, functools.partial(options, new))
    assert captures() == 2, reasons()


@every
def test_numbers_of_processors_are_no_part_of_a_recording(family: Any, recordings: list[Program]) -> None:
    """Penalties, temperatures, lengths and tokens that end a sequence are read from memory when a program runs."""
    model, inputs = build(family, CPU)
    for number in range(4):
        options = {
            "do_sample": True,
            "max_new_tokens": 12 + number,
            "min_new_tokens": 2 * number + 1,
            "temperature": 0.5 + 0.2 * number,
            "top_k": 30,
            "top_p": 0.95 - 0.01 * number,
            "repetition_penalty": 1.1 + 0.1 * number,
            "eos_token_id": [EOS, 7][: 1 + number % 2],
        }
        check(model, inputs, options)
    assert captures() == 4, reasons()
    assert len(recordings) == 1


@every
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_that_idle(family: Any, beams: int, recordings: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for four inputs is there, and does for one and two, with padding and at every end."""
    monkeypatch.setattr(Ledger, "with_more_rows", lambda self, key, others, *asked, **more: max(
        (other for other in others if other.batch > key.batch), key=lambda other: other.batch, default=None
    ))  # fmt: skip
    model, _ = build(family, CPU)
    for inputs in (4, 1, 2, 3, 1):
        check(model, of_length(family, inputs, LONG), {"max_new_tokens": 24, "do_sample": False, "num_beams": beams})
    assert captures() == 5, reasons()
    assert len(recordings) == 1


@pytest.mark.parametrize("options", [{"do_sample": True}, {"do_sample": False, "output_scores": True}], ids=str)
def test_rows_never_idle_where_somebody_sees_them(options: dict[str, Any], recordings: list[Program]) -> None:
    """What is drawn for them would move the random state, and what is returned of every step has their rows."""
    model, _ = build(FAMILIES[3], CPU)
    for inputs in (4, 1):
        given = {**options, "return_dict_in_generate": True, "max_new_tokens": 12}
        check(model, of_length(FAMILIES[3], inputs, LONG), lambda given=given: copy.deepcopy(given))
    assert captures() == 2, reasons()
    assert len(recordings) == 2
