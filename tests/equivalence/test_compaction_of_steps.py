"""Inputs that have finished leave a captured step, and the others go on: nobody sees it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from fastgen.decoding.captured.part import CapturedPart
from fastgen.optimizer.transformers.captured import any_batch, compaction
from fastgen.optimizer.transformers.captured.compaction import Compaction
from fastgen.optimizer.transformers.captured.pays import Ledger
from tests.equivalence.captured import FAMILIES, build, captures, every, need_programs, reasons, record_from
from tests.equivalence.check import check
from tests.equivalence.models import EOS, LONG, Family

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.7},
    "all returned": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True},
    "processors": {"num_beams": 2, "repetition_penalty": 1.3, "min_new_tokens": 3},
}


@pytest.fixture(autouse=True)
def inputs_of_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many inputs programs run; inputs leave whatever that costs."""
    need_programs(device, monkeypatch)
    record_from(monkeypatch, 0)
    monkeypatch.setattr(compaction, "_FEW_ROWS", 1)
    monkeypatch.setattr(compaction, "_EVERY", 1)
    monkeypatch.setattr(compaction, "_MOVE", 0.0)
    monkeypatch.setattr(compaction, "_RECORDINGS", 0)
    monkeypatch.setattr(Ledger, "specializing", 0.0)
    found: list[int] = []
    use = CapturedPart.use
    monkeypatch.setattr(CapturedPart, "use", lambda part, inputs: (found.append(inputs), use(part, inputs))[1])
    return found


@every
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_those_that_go_on_are_what_they_were(
    family: Family, way: dict[str, Any], inputs_of_programs: list[int]
) -> None:
    """Inputs end at any step; the next calls begin with all of them again. Buffers grow meanwhile."""
    model, _ = build(family, CPU)
    given = family.make_inputs(6, LONG)
    ends = torch.randperm(90, generator=torch.Generator().manual_seed(3))[: 4 if "num_beams" in way else 12].tolist()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [EOS, *ends], **way}
    for _ in range(2):
        check(model, given, options)
    assert captures() == 2, reasons()
    assert max(inputs_of_programs) == 6
    assert min(inputs_of_programs) < 6 or family.name == "bart", "whose inputs all end at once here"


def test_nobody_leaves_where_that_is_seen(inputs_of_programs: list[int]) -> None:
    family = FAMILIES[3]
    model, _ = build(family, CPU)
    is_seen: list[dict[str, Any]] = [
        {"do_sample": True},
        {"return_dict_in_generate": True, "output_scores": True},
        {"encoder_repetition_penalty": 3.0},  # of the tokens of each input, which stay where they are
        {"encoder_no_repeat_ngram_size": 1},
    ]
    for more in is_seen:
        options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [EOS, *range(20, 32)], **more}
        check(model, family.make_inputs(6, LONG), lambda options=options: copy.deepcopy(options))
    assert set(inputs_of_programs) == {6}


def step_of(left: list[bool], monkeypatch: pytest.MonkeyPatch, known: bool) -> tuple[Compaction, Any, list[int]]:
    """A compaction of a step in which these go on, and after how many steps inputs have left."""
    part = mock.Mock(smallest=lambda inputs: inputs if known else None)
    step = mock.Mock(parts={1: part}, key=mock.Mock(per_input=4))
    step.search.unfinished = torch.tensor(left).unsqueeze(1)
    ledger = Ledger()
    monkeypatch.setattr(Ledger, "specializing", 0.5)
    monkeypatch.setattr(any_batch, "is_symbolic", lambda key: True)
    monkeypatch.setattr(any_batch, "is_recorded", lambda *asked: True)
    made = Compaction(None, step.key, ledger, len(left), 1, 0)
    moved: list[int] = []
    monkeypatch.setattr(made, "_compact", lambda *_: moved.append(made._steps))
    return made, step, moved


@pytest.mark.parametrize(
    ("left", "known", "expected"),
    [
        ([True] * 4 + [False] * 4, False, 20),  # half of 100 ms a step, until 0.5 s and four moves are lost
        ([True] * 4 + [False] * 4, True, 8),  # the moves alone
        ([True] * 8, True, None),
        ([False] * 8, True, None),
        ([True, True, False, False], True, None),  # of 16 rows
    ],
)
def test_inputs_leave_once_idle_rows_have_cost_as_much(
    left: list[bool], known: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compaction, "_FEW_ROWS", 16)
    made, step, moved = step_of(left, monkeypatch, known)
    for _ in range(40):
        made.after(step, 0.1)
    assert (moved[0] if moved else None) == expected
