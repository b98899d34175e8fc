"""Requests with LoRA adapters of their own (`adapter_names`) share steps, and each gets what its adapter gives."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import fastgen
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.captured.slots import Slots
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.engine.adapters import FAMILIES, LONG, OPTIONS, adapted, alone, config_of, draw, peft
from tests.engine.conftest import PROMPTS, WAIT, Gate, run, run_with_a_change
from tests.equivalence.models import BY_NAME
from tests.noting import noted

FAMILIES_AND_CONV1D = [*FAMILIES, "gpt2"]
# None: a request without one of its own.
NAMES = ["one", "two", "three", "__base__", None, "default"]
STEPS = LONG["max_new_tokens"] - 1


def with_three(name: str = "llama", kind: str = "lora", **options: Any) -> Any:
    """A model with three adapters besides the active one."""
    if name == "gpt2":
        layers = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        model = peft.get_peft_model(copy.deepcopy(BY_NAME[name].build()), layers)
        draw(model, 1)
    else:
        model, layers = adapted(name, kind, **options), config_of(name, kind, **options)
    for seed, adapter in enumerate(NAMES[:3], 7):
        model.add_adapter(adapter, layers)
        draw(model, seed, f".{adapter}.")
    return model.eval()


def of_its_own(adapter: str | None) -> dict[str, Any]:
    return {} if adapter is None else {"adapter_names": [adapter]}


def requests_for(
    model: Any, names: Sequence[str | None], prompts: Sequence[list[int]] = PROMPTS, rows: int = 32, **options: Any
) -> list[Request]:
    seed = 3 if options.get("do_sample") else None
    given = zip(prompts, names, strict=False)
    return [make(model, prompt, None, {**LONG, **options, **of_its_own(name)}, seed, rows) for prompt, name in given]


@contextlib.contextmanager
def active(model: Any, adapter: str | None) -> Iterator[None]:
    """What peft does for all requests: an adapter that is switched on, or none."""
    if adapter == "__base__":
        with model.disable_adapter():
            yield
        return
    model.set_adapter(adapter or "default")
    yield
    model.set_adapter("default")


def assert_theirs(
    model: Any,
    requests: Sequence[Request],
    names: Sequence[str | None],
    prompts: Sequence[list[int]] = PROMPTS,
    **options: Any,
) -> None:
    """Each has the tokens of a call with its adapter."""
    for request, name, prompt in zip(requests, names, prompts, strict=False):
        result = request.future.result(0)
        named = alone(model, prompt, request.seed, **{**LONG, **options}, **of_its_own(name))
        assert torch.equal(result, named), f"{name}: {named.tolist()}, and not {result.tolist()}"


def assert_shared(executor: ContinuousBatches, most_steps: int) -> None:
    assert not (executor.alone or executor.counts["repeated"])
    assert 0 < executor.counts["steps"] <= most_steps


def check(
    executor: ContinuousBatches,
    names: Sequence[str | None],
    prompts: Sequence[list[int]] = PROMPTS,
    at_once: int = 1,
    **options: Any,
) -> list[Request]:
    """Runs a request of each adapter, and asserts that it gets what the adapter gives."""
    requests = requests_for(executor.model, names, prompts, **options)
    run(executor, requests, at_once)
    assert_theirs(executor.model, requests, names, prompts, **options)
    return requests


@pytest.mark.parametrize("captured_step", ["auto", "always"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", FAMILIES_AND_CONV1D)
def test_requests_of_all_adapters_share_a_step(name: str, options: dict[str, Any], captured_step: str) -> None:
    fastgen.enable(captured_step=captured_step)
    model = with_three(name)
    executor = ContinuousBatches(model, 32)
    requests = check(executor, NAMES, **options)
    for request, adapter, prompt in zip(requests, NAMES, PROMPTS, strict=True):
        with active(model, adapter):  # the other way in which peft has one
            assert torch.equal(request.future.result(0), alone(model, prompt, request.seed, **{**LONG, **options}))
    assert len({tuple(request.future.result(0).flatten().tolist()[-24:]) for request in requests}) > 4
    assert_shared(executor, STEPS + len(NAMES))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_requests_of_an_adapter_share_prefills(name: str) -> None:
    """Of several lengths, so that there is padding."""
    model, names, prompts = with_three(name), NAMES[:3] * 6, [each for each in PROMPTS for _ in range(3)]
    executor = ContinuousBatches(model, 32)
    run(executor, requests_for(model, names, prompts, max_new_tokens=12), at_once=32)
    check(executor, names, prompts, at_once=32, max_new_tokens=12)
    assert executor.counts["batches"] <= 2 * 3 * 3 and executor.counts["busy_row_steps"] and not executor.alone


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_rows_take_their_adapters_along(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """When others leave, when the step grows, and when an adapter comes that it has not served."""
    fastgen.enable(captured_step="always")
    model, moved = with_three(name), noted(monkeypatch, DecodeStep, "move")
    names = ["one", "two", None, "__base__", "one", "three", "two", "default", None, "three", "two", "one"]
    lengths, prompts = [9, 18, 12, 24, 10, 20, 8, 14, 24, 11, 16, 24], PROMPTS * 2
    each = [{**options, "max_new_tokens": length} for length in lengths]
    executor = ContinuousBatches(model, 16)
    requests = [
        requests_for(model, [own], [prompt], **asked)[0]
        for own, prompt, asked in zip(names, prompts, each, strict=True)
    ]
    run(executor, requests)
    for request, own, prompt, asked in zip(requests, names, prompts, each, strict=True):
        assert_theirs(model, [request], [own], [prompt], **asked)
    assert moved and not (executor.alone or executor.counts["repeated"])


def test_an_adapter_comes_in_the_middle() -> None:
    fastgen.enable(captured_step="always")
    model = with_three()
    executor = ContinuousBatches(model, 8)
    first, second = requests_for(model, ["one", None]), requests_for(model, ["two", "__base__"], PROMPTS[2:])
    left = [*first, *second]

    def more() -> list[Request]:
        if not left or (len(left) == 2 and executor.counts["steps"] < 12):
            return []
        come = [left.pop(0)]
        return executor.choose(come)

    for _ in executor.steps(more):
        pass
    assert_theirs(model, [*first, *second], ["one", None, "two", "__base__"])
    assert_shared(executor, 12 + STEPS + 2)


def test_a_request_is_cancelled_beside_others_of_other_adapters(gate: Gate) -> None:
    model = with_three()
    with fastgen.Engine(model, slots=8) as engine:
        waits = engine.submit(PROMPTS[0], adapter_names=["one"], logits_processor=[gate], **LONG)
        others = [engine.submit(PROMPTS[1], **of_its_own(name), **LONG) for name in NAMES]
        assert gate.has_come.wait(WAIT) and waits.cancel()
        gate.may_go.set()
        found = [other.result(WAIT) for other in others]
    for name, result in zip(NAMES, found, strict=True):
        assert torch.equal(result, alone(model, PROMPTS[1], **of_its_own(name), **LONG))
    assert waits.cancelled() and engine.stats()["cancelled"] == 1


def test_an_adapter_is_deleted_in_the_middle() -> None:
    """Its requests fail, as peft has it, and the others begin again."""
    fastgen.enable(captured_step="always")
    model = with_three()
    executor, names = ContinuousBatches(model, 8), ["one", "two", None]
    requests = requests_for(model, names)
    run_with_a_change(executor, requests, 12, lambda: model.delete_adapter("two"))
    with pytest.raises(ValueError, match="non-existing adapter"):
        requests[1].future.result(0)
    for at in (0, 2):
        assert_theirs(model, [requests[at]], [names[at]], [PROMPTS[at]])


@pytest.mark.parametrize("max_stall", [1.0, 0.0])
def test_beginnings_are_those_of_an_adapter(max_stall: float) -> None:
    """K and V of the same tokens are others with another adapter."""
    model, beginning = with_three(), [5 + (7 * n) % 90 for n in range(100)]
    names = ["one", "two", None, "__base__"] * 2
    prompts = [[*beginning, 20 + number, 7] for number in range(len(names))]
    executor = ContinuousBatches(model, 8, max_stall=max_stall)
    check(executor, names, prompts, max_new_tokens=12)
    assert executor.stats()["shared_positions"] == 4 * 96


def test_sources_are_those_of_an_adapter() -> None:
    executor = ContinuousBatches(with_three("bart"), 8)
    check(executor, ["one", "two", None] * 2, [PROMPTS[1]] * 6)
    assert executor.stats()["shared_sources"] == 3


def test_two_engines() -> None:
    fastgen.enable(captured_step="always")
    model = with_three()
    with fastgen.Engine(model, slots=8) as one, fastgen.Engine(model, slots=4) as other:
        futures = [
            [engine.submit(prompt, **of_its_own(name), **LONG) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
            for engine in (one, other)
        ]
        found = [[future.result(WAIT) for future in each] for each in futures]
        assert not (one.stats()["alone"] or other.stats()["alone"])
    for name, prompt, *results in zip(NAMES, PROMPTS, *found, strict=True):
        expected = alone(model, prompt, **of_its_own(name), **LONG)
        assert all(torch.equal(result, expected) for result in results)


def test_more_adapters_than_a_step_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have steps in turn, each with those that came together first, whatever mixtures come later."""
    model, seen = with_three(), noted(monkeypatch, Slots, "_enter", lambda slots, *given: slots._key.adapters)
    names = [f"number {number}" for number in range(11)]
    for seed, name in enumerate(names):
        model.add_adapter(name, config_of("llama"))
        draw(model, 20 + seed, f".{name}.")
    model.eval()
    executor, prompts = ContinuousBatches(model, 16), [PROMPTS[n % 6] for n in range(len(names))]
    for order in (names, names[::-1], [*names[5:], *names[:5]]):
        check(executor, order, prompts, max_new_tokens=12)
    assert not executor.alone and max(map(len, seen)) == 8
    assert len(set(seen)) == 11, "one for each that has come for the first time"


@pytest.mark.parametrize("captured_step", ["never", "auto"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_static_batches(name: str, captured_step: str) -> None:
    """Without slots, requests of one adapter share calls."""
    fastgen.enable(captured_step=captured_step)
    model, names, prompts = with_three(name), ["one", "two", None] * 2, PROMPTS[:3] * 2
    requests = requests_for(model, names, prompts)
    for request in requests:
        request.is_static = True
    executor = ContinuousBatches(model, 8)
    run(executor, requests, at_once=8)
    assert_theirs(model, requests, names, prompts)
    assert executor.counts["batches"] == 3 and not (executor.alone or executor.counts["steps"])


def test_without_fastgen(monkeypatch: pytest.MonkeyPatch) -> None:
    """peft's own code has the adapters."""
    model = with_three()
    requests = requests_for(model, NAMES)
    fastgen.disable()
    monkeypatch.setattr(row_adapters, "choosing", None)
    run(ContinuousBatches(model, 8), requests, at_once=8)
    assert_theirs(model, requests, NAMES)


def test_an_adapter_that_is_not_a_number_changes_no_other_row() -> None:
    fastgen.enable(captured_step="always")
    model, names = with_three(), ["one", "two", None, "__base__"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".three." in name:
                parameter.fill_(torch.inf if "lora_A" in name else torch.nan)
    executor, requests = ContinuousBatches(model, 8), requests_for(model, [*names, "three"])
    run(executor, requests)
    assert_theirs(model, requests[:4], names)
    assert_shared(executor, STEPS + 5)


def test_code_of_the_users_and_scores() -> None:
    model, streamed = with_three(), list[int]()

    def favours(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.arange(scores.shape[-1]) % 7

    with fastgen.Engine(model, slots=8) as engine:
        own = [engine.submit(PROMPTS[0], logits_processor=[favours], **of_its_own(name), **LONG) for name in NAMES]
        returned = engine.submit(
            PROMPTS[1], adapter_names=["two"], return_dict_in_generate=True, output_scores=True, **LONG
        )
        streamed = list(engine.stream(PROMPTS[2], adapter_names=["one"], **LONG))
        found = [each.result(WAIT) for each in own]
        scores = returned.result(WAIT)
        assert not engine.stats()["alone"]
    for name, result in zip(NAMES, found, strict=True):
        assert torch.equal(result, alone(model, PROMPTS[0], logits_processor=[favours], **of_its_own(name), **LONG))
    expected = alone(model, PROMPTS[1], adapter_names=["two"], return_dict_in_generate=True, output_scores=True, **LONG)
    assert torch.equal(scores.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(scores.scores), torch.stack(expected.scores), rtol=1e-3, atol=1e-4)
    assert streamed == alone(model, PROMPTS[2], adapter_names=["one"], **LONG)[0, 1:].tolist()


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_guidance_runs_the_model_with_the_adapter_of_the_request(name: str) -> None:
    """In each step, between those of all."""
    options: dict[str, Any] = {"guidance_scale": 1.5, "max_new_tokens": 12}
    executor = ContinuousBatches(with_three(name), 32)
    check(executor, NAMES, **options)
    assert executor.counts["busy_row_steps"] and not executor.counts["repeated"]


def test_adapters_of_other_ranks_scales_and_layers() -> None:
    model = adapted("llama")
    others = {
        "one": peft.LoraConfig(r=2, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "o_proj"]),
        "two": peft.LoraConfig(r=3, lora_dropout=0.5, target_modules=["up_proj"]),
        "three": peft.LoraConfig(r=4, lora_bias=True, target_modules=["gate_proj"], layers_to_transform=[0]),
    }
    for seed, (adapter, config) in enumerate(others.items()):
        model.add_adapter(adapter, config)
        draw(model, 40 + seed, f".{adapter}.")
    model.eval()
    executor = ContinuousBatches(model, 8)
    check(executor, NAMES)
    assert_shared(executor, STEPS + len(NAMES))


def test_several_active_adapters_beside_one() -> None:
    model = with_three()
    model.base_model.set_adapter(["default", "one"])
    executor = ContinuousBatches(model, 8)
    check(executor, [None, "two", "default"])
    assert_shared(executor, STEPS + 3)


def test_other_models_have_their_own_adapters() -> None:
    """Code of the user's may have another model generate, also while the request is prefilled."""
    model, other = with_three(), with_three()

    def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = other.generate(input_ids=ids[:, -3:], max_new_tokens=1, min_new_tokens=1)
        return scores.index_fill(1, said[0, -1:], 1e4)

    with fastgen.Engine(model, slots=8) as engine:
        found = engine.submit(PROMPTS[3], adapter_names=["two"], logits_processor=[asks], **LONG).result(WAIT)
        assert not engine.stats()["alone"]
    assert torch.equal(found, alone(model, PROMPTS[3], adapter_names=["two"], logits_processor=[asks], **LONG))


def test_names_that_are_refused() -> None:
    model = with_three()
    with fastgen.Engine(model) as engine:
        with pytest.raises(ValueError, match="the model has no four; it has default, one, three, two"):
            engine.submit(PROMPTS[0], adapter_names=["four"], **LONG)
        with pytest.raises(ValueError, match="adapter_names"):
            engine.submit(PROMPTS[0], adapter_names=["one", "two"], **LONG).result(WAIT)
        found = engine.submit(PROMPTS[0], adapter_names=None, **LONG).result(WAIT)
        assert engine.stats()["busy_row_steps"]
    assert torch.equal(found, alone(model, PROMPTS[0], **LONG))


def test_merged_adapters_and_training_are_for_peft_to_refuse() -> None:
    model = with_three()
    with fastgen.Engine(model) as engine:
        for change, back in ((model.merge_adapter, model.unmerge_adapter), (model.train, model.eval)):
            change()
            with pytest.raises(ValueError, match="Cannot pass `adapter_names`"):
                engine.submit(PROMPTS[0], adapter_names=["one"], **LONG).result(WAIT)
            back()
        found = engine.submit(PROMPTS[0], adapter_names=["one"], **LONG).result(WAIT)
    assert torch.equal(found, alone(model, PROMPTS[0], adapter_names=["one"], **LONG))


@pytest.mark.parametrize("kind", ["lora-embedding", "saved"])
def test_other_kinds_of_adapters_have_calls_of_their_own(kind: str) -> None:
    """peft hands each row its adapter by hooks, on the library's code."""
    model = adapted("llama", kind)
    model.add_adapter("one", config_of("llama", kind))
    draw(model, 2, ".one.")
    model.eval()
    with fastgen.Engine(model, slots=8) as engine:
        others = [engine.submit(prompt, **LONG) for prompt in PROMPTS[:3]]
        named = [engine.submit(PROMPTS[0], adapter_names=[name], **LONG) for name in ("one", "__base__", "default")]
        found = [future.result(WAIT) for future in (*named, *others)]
        stats = engine.stats()
    expected = [alone(model, PROMPTS[0], adapter_names=[name], **LONG) for name in ("one", "__base__", "default")]
    expected += [alone(model, prompt, **LONG) for prompt in PROMPTS[:3]]
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(found[0], found[2]) and torch.equal(found[2], found[3])
    assert stats["alone"] == {"the model's input adapter_names": 3} and stats["busy_row_steps"]


def test_a_forward_pass_of_the_users_sees_its_adapter() -> None:
    """FastGen's does not stand for it, so peft's own code has to hand it the names."""
    model, seen = with_three(), list[Any]()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("adapter_names"))
        return plain(*args, **kwargs)

    layer.forward = forward
    with fastgen.Engine(model) as engine:
        found = engine.submit(PROMPTS[0], adapter_names=["one"], **LONG).result(WAIT)
    assert seen == [["one"]] * len(seen) and seen
    assert torch.equal(found, alone(model, PROMPTS[0], adapter_names=["one"], **LONG))
