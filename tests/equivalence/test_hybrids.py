"""Models with states besides K and V, or in their place: the same tokens, and the same states in returned caches."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import fastgen
from fastgen import releases, settings
from fastgen.decoding.captured.graph import CapturedPart
from fastgen.decoding.captured.program import Program
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.kv.states import FixedStates
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.cache_layers import SharedStates, of_layer
from tests import near_ties
from tests.equivalence.captured import BEAMS, GREEDY, NEW, captures, fail_at, leave_at_once, reasons, record_programs
from tests.equivalence.cases import DECODING, SHAPES
from tests.equivalence.check import accelerated, cache_with, chat, check, fallbacks, run
from tests.equivalence.hybrids import BY_NAME, HYBRIDS
from tests.equivalence.models import EOS, LONG, VOCABULARY, Family, padded
from tests.equivalence.test_failures import assert_repeated
from tests.noting import noted

EVERYTHING = {"return_dict_in_generate": True, "output_scores": True}
# One for each kind of layers: of states alone, beside those with K and V, and of both.
KINDS = [name for name in ("qwen3.5", "lfm2", "granite-hybrid", "falcon-h1", "mamba2") if name in BY_NAME]

pytestmark = [
    pytest.mark.skipif(not releases.keeps_states_in_cache(), reason="states are kept elsewhere"),
]
each_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Steps are recorded as programs; an entry for each replay of one."""
    record_programs(device, monkeypatch)
    return noted(monkeypatch, Program, "replay")


# ---- all of them


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("family", HYBRIDS, ids=str)
def test_hooks(family: Family, decoding: str) -> None:
    with settings.changed(captured_step="never"):
        check(family.build(), family.make_inputs(), {**DECODING[decoding], **EVERYTHING})
    assert accelerated() == 1


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("family", HYBRIDS, ids=str)
def test_captured_steps(family: Family, decoding: str, programs: list[None]) -> None:
    """On a padded batch, with scores and the cache that is returned."""
    with settings.changed(captured_step="always"):
        result = check(family.build(), family.make_inputs(), {**NEW, **DECODING[decoding], **EVERYTHING})
    assert len(result.sequences.unique()) > 12
    assert accelerated() == captures() == 1, reasons()
    assert len(programs) >= len(result.scores) - 2


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "padded"])
@pytest.mark.parametrize("way", [GREEDY, BEAMS], ids=["greedy", "beams"])
@each_kind
def test_shapes(name: str, way: dict[str, Any], shape: str, programs: list[None]) -> None:
    check(BY_NAME[name].build(), BY_NAME[name].make_inputs(**SHAPES[shape]), {**way, **EVERYTHING})
    if shape != "padded on the other side":  # a mask with holes
        assert accelerated() == captures() == 1, reasons()
        assert programs


@each_kind
def test_eager_attention(name: str, programs: list[None]) -> None:
    check(BY_NAME[name].build("eager"), BY_NAME[name].make_inputs(), GREEDY)
    assert captures() == 1, reasons()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("decoding", ["greedy", "beam"])
@pytest.mark.parametrize("captured_step", ["always", "never"])
@pytest.mark.parametrize("family", HYBRIDS, ids=str)
def test_bfloat16(family: Family, captured_step: Any, decoding: str, programs: list[None]) -> None:
    """Accelerated, and sound: the first scores differ by rounding, and nothing else."""
    model, options = copy.deepcopy(family.build()).to(torch.bfloat16), {**NEW, **DECODING[decoding], **EVERYTHING}
    with settings.changed(captured_step=captured_step):
        with fastgen.disabled():
            original = run(model, family.make_inputs(), options | {"eos_token_id": None})
        ours = run(model, family.make_inputs(), options | {"eos_token_id": None})
    assert accelerated() == 1 and captures() == (captured_step == "always"), reasons()
    assert ours.sequences.shape == original.sequences.shape
    assert not any(scores.isnan().any() for scores in ours.scores)
    first, other = (result.scores[0].float().clamp(min=-50) for result in (original, ours))
    assert (first - other).abs().max() < 0.3


# ---- kept steps


@each_kind
def test_calls_of_other_lengths_share_a_step(name: str, programs: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of the call before, and nothing is recorded again."""
    recordings, family = noted(monkeypatch, CapturedPart, "capture"), BY_NAME[name]
    for number, (lengths, new) in enumerate([([9, 30, 22], 12), ([40, 3, 17], 9), ([5, 5, 5], 70), ([9, 30, 22], 12)]):
        more = {"max_new_tokens": new, "eos_token_id": None, "do_sample": False}
        check(family.build(), padded(lengths, "left"), more)
        assert captures() == number + 1, reasons()
    assert len(recordings) == 1


@pytest.mark.sampled(2)
@each_kind
def test_calls_of_other_numbers_of_inputs(name: str, programs: list[None]) -> None:
    """From one recording for any number of them."""
    for number, batch in enumerate([4, 2, 3, 1, 4]):
        check(BY_NAME[name].build(), BY_NAME[name].make_inputs(batch), GREEDY)
        assert captures() == number + 1, reasons()


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@each_kind
def test_weights_that_change_between_calls(name: str, options: dict[str, Any], programs: list[None]) -> None:
    model, inputs = copy.deepcopy(BY_NAME[name].build()), BY_NAME[name].make_inputs()
    results = []
    for _ in range(3):
        results.append(check(model, inputs, options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
            model.get_output_embeddings().weight[EOS] = 0
    assert captures() == 3, reasons()
    assert not torch.equal(results[0], results[-1])


@each_kind
def test_inputs_that_end_leave(name: str, programs: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places are taken by others, with their states."""
    leave_at_once(monkeypatch)
    moved, kept = noted(monkeypatch, FixedStates, "insert"), noted(monkeypatch, SharedStates, "keep")
    family = BY_NAME[name]
    ends = {**GREEDY, "eos_token_id": list(range(4, VOCABULARY, 11))}
    for captured_step in ("auto", "never"):
        with settings.changed(captured_step=captured_step):
            for options in (ends, {**ends, "num_beams": 3}):
                check(family.build(), family.make_inputs(8), options)
    assert accelerated() == 4 and captures() == 2, reasons()
    has_own_inputs = "prepare_inputs_for_generation" in vars(type(family.build()))
    assert moved and (kept or has_own_inputs)  # which could read all rows


# ---- caches


@pytest.mark.parametrize("captured_step", ["always", "never"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampling", "beams"])
@each_kind
def test_turns_of_a_chat(name: str, options: dict[str, Any], captured_step: Any, programs: list[None]) -> None:
    """Each goes on behind the cache of the last one, as the library has it."""
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(1, padding=None)
    if not any(hasattr(layer, "keys") for layer in DynamicCache(config=model.config).layers):
        pytest.skip("the library cannot go on behind a cache without positions")

    turns = 1 if "num_beams" in options else 3

    def call() -> Any:
        torch.manual_seed(1)
        cache = DynamicCache(config=model.config)
        more = {**NEW, "eos_token_id": None, **options}
        return chat(model, inputs["input_ids"], cache, lambda turn: more | {"max_new_tokens": 10 + turn}, turns), cache

    with settings.changed(captured_step=captured_step):
        near_ties.check(call)
    assert accelerated() == turns and captures() == turns * (captured_step == "always"), (reasons(), fallbacks())


@pytest.mark.parametrize("captured_step", ["always", "never"])
@each_kind
def test_a_cache_of_rows_that_end_one_by_one(name: str, captured_step: Any, programs: list[None]) -> None:
    """Those that are over go on, and so do their states."""
    family = BY_NAME[name]
    with settings.changed(captured_step=captured_step):
        check(family.build(), family.make_inputs(4), {**GREEDY, **EVERYTHING, "eos_token_id": list(range(11, 40))})
    assert accelerated() == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [1, 3, 8])
@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@each_kind
def test_a_step_that_fails(
    name: str, options: dict[str, Any], at: int, programs: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's loop goes on from the prefill, whose states are as they were."""
    steps = fail_at(monkeypatch, at)
    check(BY_NAME[name].build(), BY_NAME[name].make_inputs(), {**options, **EVERYTHING})
    assert len(steps) == at and accelerated() == 1 and not captures()


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "mamba2"])
def test_a_call_that_fails_leaves_a_cache_as_it_was(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is repeated with the original code, on the states that the cache has come with."""
    fastgen.enable(captured_step="never")
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(1, padding=None)

    def call() -> Any:
        cache = DynamicCache(config=model.config)
        with fastgen.disabled():
            tokens = model.generate(**inputs, **GREEDY, eos_token_id=None, **releases.with_cache(cache))
        tokens = torch.cat([tokens, inputs["input_ids"][:, :5]], dim=1)
        more = {**GREEDY, "eos_token_id": None, **releases.with_cache(cache)}
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **more), cache

    assert_repeated(call, monkeypatch, GrowingKV, "extend", at)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"max_time": 1e6}], ids=["in one piece", "with a criterion"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "mamba2"])
def test_an_interrupt_between_the_pieces_of_a_step(
    name: str, options: dict[str, Any], at: int, programs: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of the user's has the states of the positions that its K and V are of."""
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(1, padding=None)
    replay, cache, given = Program.replay, DynamicCache(config=model.config), {**GREEDY, "eos_token_id": None}

    def interrupted(program: Program) -> None:
        replay(program)
        if len(programs) == at:
            raise KeyboardInterrupt

    with fastgen.disabled():
        tokens = model.generate(**inputs, **given)
    monkeypatch.setattr(Program, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **given, **options, **releases.with_cache(cache))
    with fastgen.disabled():
        expected = cache_with(model, tokens[:, : cache.get_seq_length()])
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        for state, right in zip(of_layer(layer).values(), of_layer(other).values(), strict=True):
            torch.testing.assert_close(state, right, atol=1e-4, rtol=1e-4)


# ---- what is declined


def test_a_model_that_does_not_update_states_in_place(programs: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = transformers.cache_utils.LinearAttentionLayer

    def assigns(self: Any, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self.is_recurrent_states_initialized[state_idx] = True
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    monkeypatch.setattr(layer, "update_recurrent_state", assigns)
    monkeypatch.setattr("fastgen.decoding.library_code.is_own", lambda value: True)
    check(BY_NAME["qwen3.5"].build(), BY_NAME["qwen3.5"].make_inputs(), GREEDY)
    assert reasons() == {"the model does not update its states in place": 1}


@each_kind
def test_drafts(name: str, programs: list[None]) -> None:
    """Nothing goes back to the positions in front of a draft."""
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs()
    with settings.changed(self_speculation="int8"):
        check(model, inputs, GREEDY)
    speculation = fastgen.stats()[loop.SPECULATION]["not used"]
    assert speculation == {"a model with states that cannot go back": 1}
    assert captures() == 1, reasons()


@each_kind
def test_assisted_generation(name: str) -> None:
    """It is the library's, which refuses most of these models."""
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs(1, padding=None)

    def call() -> Any:
        try:
            return model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3)
        except ValueError as error:
            return str(error)

    near_ties.check(call)
    assert accelerated() == 0


# ---- the engine


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@each_kind
def test_slots(name: str, options: dict[str, Any], programs: list[None]) -> None:
    """Inputs come and go: each has the states of its own."""
    model = BY_NAME[name].build()
    generator = torch.Generator().manual_seed(0)
    lengths, news = [3, 30, 7, LONG, 5, 9], [14, 9, 17, 12, 20, 10]
    prompts = [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    with fastgen.Engine(model, slots=3) as engine:
        futures = []
        for number, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
            futures.append(engine.submit(prompt, max_new_tokens=new, eos_token_id=None, do_sample=False, **options))
            if number % 3 == 2:
                threading.Event().wait(0.05)
        results = [future.result(60) for future in futures]
        stats = engine.stats()
    for prompt, new, result in zip(prompts, news, results, strict=True):
        with fastgen.disabled():
            ids = torch.tensor([prompt])
            expected = model.generate(ids, max_new_tokens=new, eos_token_id=None, do_sample=False, **options)
        assert torch.equal(result.view_as(expected), expected)
    assert programs and stats["executor"] == "slots" and not stats["alone"]
    assert stats["busy_row_steps"] > stats["steps"]  # some were there together
