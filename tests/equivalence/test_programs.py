"""The captured step on the CPU: the grid of test_models.py and more, with decoding steps as recorded programs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import fastgen
from fastgen.decoding import linear_ops, lm_head
from fastgen.decoding.captured import graph, program
from fastgen.decoding.captured.program import Program
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.captured import graph_cache, key, pays
from tests.equivalence.captured import (
    BEAMS,
    FAMILIES,
    GREEDY,
    build,
    captures,
    every,
    reasons,
    record_from,
    record_programs,
    spoil_shared_memory,
)
from tests.equivalence.check import accelerated, check, default_dtype, run
from tests.equivalence.test_models import test_decoding, test_shapes  # noqa: F401 (collected here as well)
from tests.noting import noted

pytestmark = pytest.mark.sampled(12)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is recorded for the first call already. The largest outputs are found with a copy of the weight."""
    record_programs(device, monkeypatch)
    monkeypatch.setattr(lm_head, "_LEAST_BYTES", 0)
    spoil_shared_memory(monkeypatch)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The program of each replay."""
    return noted(monkeypatch, Program, "replay", lambda program: program)


SAMPLED = {"max_new_tokens": 24, "do_sample": True, "num_beams": 1}


def ends_late(tokens: torch.Tensor, scores: Any) -> torch.Tensor:
    """A criterion of the user's."""
    return (tokens[:, -1] % 7 == 3) & (tokens.shape[1] > 9)


class Rotated(LogitsProcessor):
    """Of the user's: favours a token by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.roll(self.calls, dims=-1)


@every
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 9},
        {"top_p": 0.8, "num_return_sequences": 2},
        {"top_k": 0, "min_p": 0.05, "repetition_penalty": 1.3},
        {"top_k": 0, "typical_p": 0.7, "no_repeat_ngram_size": 2},
        {"logits_processor": LogitsProcessorList([Rotated()])},
        # Candidates are drawn from all beams of an input, and come in the order in which they are drawn.
        {"num_beams": 3},
        {"num_beams": 3, "early_stopping": True, "num_return_sequences": 3},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.3},
        {"num_beams": 4, "top_k": 2},  # fewer candidates than are drawn
        {"num_beams": 3, "top_k": 0, "top_p": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"num_beams": 3, "logits_processor": LogitsProcessorList([Rotated()])},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_samples_are_the_librarys(family: Any, options: dict[str, Any]) -> None:
    """For the same seed, call after call, also after a recording, and where sequences end at different steps."""
    model, inputs = build(family, CPU)
    for given in ({}, {"eos_token_id": list(range(3, 9))}):
        for _ in range(2):
            check(model, inputs, lambda given=given: copy.deepcopy({**SAMPLED, **options, **given}))
    assert captures() == 4, reasons()


@every
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "case",
    ["longer", "fails", "fails to plan", "host criterion", "host code", "many", "halved", "doubled", "nothing left"],
)
def test_samples_and_the_random_state(family: Any, beams: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way that a call with a captured step can take, tokens and the state after it are the library's."""
    model, inputs = build(family, CPU)
    options: dict[str, Any] = {**SAMPLED, "num_beams": beams, "num_return_sequences": 2}
    wanted = 2
    if case == "longer":
        monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 1)
        monkeypatch.setattr(key, "_NEW_ON_CPU", (1, 3))
    elif case == "fails":
        monkeypatch.setattr(program, "record", lambda function, scratch: (function(), 1 / 0))
        wanted = 0
    elif case == "fails to plan":
        monkeypatch.setattr(program, "_lifetimes", lambda *arguments: 1 / 0)
        wanted = 0
    elif case == "many":
        options.update(num_return_sequences=9, num_beams=9 if beams > 1 else 1)
    if case in ("host criterion", "host code"):
        options["stopping_criteria"] = StoppingCriteriaList([ends_late])
    if case in ("halved", "doubled", "host code"):
        types = {"halved": lambda _, scores: scores.bfloat16(), "doubled": lambda _, scores: scores.double()}
        options["logits_processor"] = LogitsProcessorList([types.get(case, Rotated())])
        # Added to the scores of the beams, 16 bits become float32.
        wanted = 0 if case == "doubled" or (case == "halved" and beams == 1) else wanted
    if case == "nothing left":  # from the ninth step on, which the library says
        options["logits_processor"] = LogitsProcessorList([NothingLeft(beams)])
        wanted = 0
    for _ in range(2):
        results = []
        for is_ours in (True, False):
            with contextlib.nullcontext() if is_ours else fastgen.disabled():
                torch.manual_seed(5)
                try:
                    results.append(model.generate(**copy.deepcopy(inputs), **copy.deepcopy(options)))
                except RuntimeError as error:
                    results.append(str(error))
                results.append(torch.get_rng_state())
        ours, state, original, other = results
        assert torch.equal(state, other)
        assert ours == original if isinstance(original, str) else torch.equal(ours, original)
        assert isinstance(original, str) == (case == "nothing left")
    assert captures() == wanted, reasons()


class NothingLeft(LogitsProcessor):
    """Of the user's: after some steps there is nothing to choose from in some rows."""

    def __init__(self, rows: int) -> None:
        self.steps, self.rows = 0, rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        scores = scores.clone()
        if self.steps > 8:
            scores[-self.rows :] = -torch.inf
        return scores


class Unseen(torch.nn.Linear):
    """A layer with a kernel that torch's dispatcher does not see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = super().forward(x)
        out = torch.empty(values.shape)
        ctypes.memmove(out.untyped_storage().data_ptr(), values.untyped_storage().data_ptr(), values.nbytes)
        return out


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_a_kernel_that_is_not_seen() -> None:
    model, inputs = build(FAMILIES[3], CPU)
    head = model.get_output_embeddings()
    unseen = Unseen(head.in_features, head.out_features, bias=False)
    unseen.weight = head.weight
    model.set_output_embeddings(unseen.eval())
    check(model, inputs, GREEDY)
    assert captures() == 0 and accelerated() == 1, reasons()
    assert "has written" in next(iter(reasons())), reasons()


@every
def test_many_sequences(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are captured where the weights are small."""
    model, inputs = build(family, CPU)
    many = {**BEAMS, "num_beams": 12}
    check(model, inputs, many)
    assert captures() == 1, reasons()
    largest = 36 * loop._size_of_weights(model)
    monkeypatch.setattr(loop, "_MOST_ROWS_ON_CPU", 35)
    for bound, captured in ((largest, 1), (largest - 1, 0)):
        fastgen.reset_stats()
        monkeypatch.setattr(loop, "_MAX_WORK_ON_CPU", bound)
        check(model, inputs, many)
        assert (captures(), accelerated()) == (captured, 1), reasons()
    assert "large weights" in next(iter(reasons()))
    check(model, inputs, BEAMS)
    assert captures() == 1, reasons()


def test_interpreted_kernels_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not go through torch's dispatcher: a program would leave them out."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: True)
    check(*build(FAMILIES[0], CPU), BEAMS)
    assert captures() == 0 and "interpreted" in next(iter(reasons()))


def test_a_step_is_recorded_once_it_pays(monkeypatch: pytest.MonkeyPatch, replays: list[Program]) -> None:
    """Calls of one key count together. Until then they are accelerated as without a captured step."""
    new = GREEDY["max_new_tokens"]
    monkeypatch.setattr(pays, "MANY", 1)
    record_from(monkeypatch, 2 * new)
    model, inputs = build(FAMILIES[0], CPU)
    found = []
    for options in (GREEDY, BEAMS, GREEDY, GREEDY, GREEDY, BEAMS):
        check(model, inputs, {**options, "min_new_tokens": new})
        found.append(captures())
    assert found == [0, 0, 0, 1, 2, 2] and accelerated() == 6 and replays


RETURNED = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}


@every
@pytest.mark.parametrize("way", [GREEDY, BEAMS, SAMPLED], ids=["greedy", "beams", "samples"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_logits": False},
        {"output_scores": False, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "num_return_sequences": 2},
        {"eos_token_id": list(range(3, 30))},
        {"logits_processor": LogitsProcessorList([Rotated()])},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_what_is_returned_of_every_step(family: Any, way: dict[str, Any], options: dict[str, Any]) -> None:
    """Scores and logits of each step, and scores of the sequences, from the first call and a later one."""
    model, inputs = build(family, CPU)
    if way is GREEDY:
        options = {name: value for name, value in options.items() if name != "num_return_sequences"}
    for _ in range(2):
        found = check(model, inputs, lambda: copy.deepcopy({**way, **RETURNED, **options}))
        for name in ("scores", "logits"):
            steps = getattr(found, name)
            assert (steps is not None) == options.get(f"output_{name}", True)
            assert steps is None or len({each.data_ptr() for each in steps}) == len(steps) >= 1
    assert captures() == 2, reasons()


@every
@pytest.mark.parametrize(
    "options",
    [GREEDY, BEAMS, SAMPLED, {**SAMPLED, "logits_processor": [Rotated()]}],
    ids=["greedy", "beams", "samples", "host"],
)
def test_a_default_dtype(family: Any, options: dict[str, Any]) -> None:
    """It changes nothing, also where it is another one when a step is captured than when it is replayed."""
    model, inputs = build(family, CPU)
    for default in (torch.bfloat16, torch.float32, torch.float64):
        with default_dtype(default):
            check(model, inputs, lambda: copy.deepcopy({**options, **RETURNED}))
    assert captures() == 3, reasons()


def test_programs_of_all_steps_share_their_memory() -> None:
    """It goes when they are freed."""
    fastgen.disable()
    fastgen.enable()
    gc.collect()
    assert program.memory.nbytes == 0
    model, inputs = build(FAMILIES[0], CPU)
    for options in (BEAMS, GREEDY, {**GREEDY, "repetition_penalty": 1.3}):
        run(model, inputs, options)
    steps = list(graph_cache._of(model).steps.values())
    assert len(steps) == 3
    chunks = [chunk for step in steps for made, _ in step.parts[1].made for chunk in made._chunks]
    assert len(set(chunks)) < len(chunks) and program.memory.nbytes == sum(c.storage.nbytes() for c in set(chunks))
    del steps, chunks
    fastgen.disable()
    gc.collect()
    assert program.memory.nbytes == 0


def test_a_model_takes_its_programs_with_it() -> None:
    model, inputs = build(FAMILIES[0], CPU)
    run(model, inputs, BEAMS)
    assert captures() == 1
    weight = weakref.ref(model.get_output_embeddings().weight)
    step = weakref.ref(next(iter(graph_cache._of(model).steps.values())))
    del model
    gc.collect()
    assert step() is None and weight() is None


def test_a_step_that_had_to_go_must_pay_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST", 1)
    monkeypatch.setattr(pays, "MANY", 1)
    record_from(monkeypatch, GREEDY["max_new_tokens"] + 1)
    model, inputs = build(FAMILIES[0], CPU)
    for options in (GREEDY, GREEDY, GREEDY, BEAMS, BEAMS, BEAMS, GREEDY):
        run(model, inputs, {**options, "min_new_tokens": GREEDY["max_new_tokens"]})
    assert captures() == 2 and sum(reasons().values()) == 5


def test_a_setting_that_products_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was recorded under another setting is not used."""
    seen: list[bool] = []
    op = linear_ops.linear_op
    monkeypatch.setattr(linear_ops, "linear_op", lambda *call: (seen.append((p := op(*call)) is not None), p)[1])
    model, inputs = build(FAMILIES[0], CPU)
    check(model, inputs, GREEDY)
    assert any(seen)
    seen.clear()
    fastgen.enable(packed_weights="never")
    check(model, inputs, GREEDY)
    assert seen and not any(seen) and captures() == 2


# ---- several threads, and the user's code between two programs: whose turn it is


def test_a_call_that_always_has_a_captured_step_waits() -> None:
    """For another thread's call; and while user code runs, others do not wait for it."""
    model, inputs = build(FAMILIES[0], CPU)
    wanted = run(model, inputs, BEAMS)
    fastgen.reset_stats()
    fastgen.enable(captured_step="always")
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.append(run(model, inputs, BEAMS)))
    with graph.taken(CPU):
        other.start()
        other.join(timeout=0.5)
        assert other.is_alive() and not found

    class Calling(Rotated):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            other.join(timeout=600)
            return scores

    run(model, inputs, {**GREEDY, "logits_processor": LogitsProcessorList([Calling()])})
    assert not other.is_alive() and torch.equal(found[0], wanted)
    assert captures() == 2, reasons()


def test_a_call_waits_for_nobody() -> None:
    model, inputs = build(FAMILIES[0], CPU)
    with graph.taken(CPU):
        other = threading.Thread(target=lambda: run(model, inputs, BEAMS))
        other.start()
        other.join(timeout=600)
        assert not other.is_alive()
    assert accelerated() == 1 and "another thread" in next(iter(reasons()))


def test_the_turn_is_kept_while_user_code_runs() -> None:
    """Another thread goes on without; it does not take what the first would then wait for."""
    model, inputs = build(FAMILIES[0], CPU)
    others: list[dict[str, int]] = []

    class Calling(Rotated):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.calls == 4:
                other = threading.Thread(target=lambda: run(model, inputs, BEAMS))
                other.start()
                other.join(timeout=600)
                others.append(reasons())
            return super().__call__(input_ids, scores)

    run(model, inputs, {**GREEDY, "logits_processor": LogitsProcessorList([Calling()])})
    assert captures() == 1 and "another thread" in next(iter(others[0]))


def test_a_call_within_a_call(replays: list[Program]) -> None:
    """Between two programs of a step, the user's code makes calls whose programs have the same memory."""
    outer, inner = build(FAMILIES[0], CPU), build(FAMILIES[2], CPU)
    found: list[torch.Tensor] = []

    class Calling(Rotated):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.calls % 7 == 3:
                found.append(run(*inner, GREEDY))
            return super().__call__(input_ids, scores)

    check(*outer, lambda: {**BEAMS, "logits_processor": LogitsProcessorList([Calling()])})
    assert captures() == 1 + len(found) // 2 and len(found) >= 4, reasons()
    assert all(torch.equal(each, found[-1]) for each in found)
    chunks = [made._chunks for made in set(replays)]
    assert len(chunks) == 3 and len(set.union(*chunks)) < sum(map(len, chunks))


def test_a_call_of_a_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a program: the call does without one, which would overwrite what this one has computed."""
    outer, inner = build(FAMILIES[0], CPU), build(FAMILIES[2], CPU)
    found, wanted = [run(*inner, GREEDY)], run(*outer, BEAMS)
    calls, replayed = Program.calls, list[Program]()

    def handler() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Program, "calls", calls)
            found.append(run(*inner, GREEDY))

    def interrupted(program: Program, planned: bool) -> list[Callable[[], object]]:
        made = list(calls(program, planned=False))
        replayed.append(program)
        return made if len(replayed) % 5 else [*made[: len(made) // 2], handler, *made[len(made) // 2 :]]

    fastgen.reset_stats()
    monkeypatch.setattr(Program, "calls", interrupted)
    assert torch.equal(run(*outer, BEAMS), wanted)
    assert len(found) >= 4 and all(torch.equal(each, found[0]) for each in found)
    assert captures() == 1
    assert reasons() == {"a call inside a captured step of another one, on the CPU": len(found) - 1}
