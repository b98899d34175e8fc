"""Models of peft: requests run in slots, as in the model inside, and each gets what peft's `generate` gives for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import fastgen
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from tests.engine.adapters import FAMILIES, KINDS, LONG, OPTIONS, adapted, alone, config_of, draw, peft
from tests.engine.conftest import PROMPTS, WAIT, requests_for, run, run_with_a_change
from tests.equivalence.models import BY_NAME


def with_two(name: str = "llama", kind: str = "lora") -> Any:
    model = adapted(name, kind)
    model.add_adapter("other", config_of(name, kind))
    draw(model, 2, ".other.")
    return model.eval()


def assert_as_alone(model: Any, requests: list[Request]) -> None:
    for request, prompt in zip(requests, PROMPTS, strict=False):
        expected = alone(model, prompt, request.seed, **request.options)
        assert torch.equal(request.future.result(0), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_requests_come_one_by_one(name: str, kind: str, options: dict[str, Any]) -> None:
    model = adapted(name, kind)
    executor = ContinuousBatches(model, 3 * options.get("num_beams", 1))
    requests = requests_for(model, PROMPTS, **options)
    run(executor, requests)
    assert_as_alone(model, requests)
    assert executor.has_slots and executor.counts["busy_row_steps"]
    assert not (executor.alone or executor.counts["repeated"])


@pytest.mark.parametrize("name", FAMILIES)
def test_static_batches(name: str) -> None:
    """Where there are no slots, requests share calls of peft's `generate`."""
    fastgen.enable(captured_step="never")
    model = adapted(name)
    executor = ContinuousBatches(model, 8)
    requests = [make(model, prompt, None, {"max_new_tokens": 9}, None, 8) for prompt in PROMPTS]
    run(executor, requests, at_once=len(requests))
    assert_as_alone(model, requests)
    assert not (executor.has_slots or executor.alone) and executor.counts["batches"] < len(requests)


@pytest.mark.parametrize("kind", ["PeftModel", "PeftMixedModel"])
def test_models_that_peft_knows_no_task_of(kind: str) -> None:
    config = config_of("llama", task_type=None)
    model = peft.get_peft_model(copy.deepcopy(BY_NAME["llama"].build()), config, mixed=kind == "PeftMixedModel").eval()
    assert type(model).__name__ == kind
    draw(model, 1)
    executor, requests = ContinuousBatches(model, 8), requests_for(model, PROMPTS)
    run(executor, requests)
    assert_as_alone(model, requests)
    assert executor.counts["busy_row_steps"] and not executor.alone


def _train(model: Any) -> None:
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and ".default." in name)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=5.0)
    with torch.enable_grad(), torch.inference_mode(False):
        ids = torch.tensor([PROMPTS[-1]])
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set_adapter": lambda model: model.set_adapter("other"),
    "two at once": lambda model: model.base_model.set_adapter(["default", "other"]),
    "disable_adapter": lambda model: model.base_model.disable_adapter_layers(),
    "merge_adapter": lambda model: model.merge_adapter(),
    "add_adapter": lambda model: (model.add_adapter("third", config_of("llama")), model.eval()),
    "delete_adapter": lambda model: model.delete_adapter("default"),
    "training": _train,
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["peft", "inside"])
@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_change_while_requests_are_in_slots(change: str, is_inside: bool) -> None:
    """Every request is one of the model as it is then, none a mixture. Merged adapters are not added once more."""
    model = with_two()
    served = model.get_base_model() if is_inside else model
    fastgen.enable(captured_step="always")
    executor, requests = ContinuousBatches(served, 8), requests_for(served, PROMPTS[:3], **LONG)
    run_with_a_change(executor, requests, 12, lambda: CHANGES[change](model))
    assert executor.counts["repeated"]
    assert_as_alone(model, requests)


def _invoked() -> Any:
    return adapted("llama", alora_invocation_tokens=[6, 7])


@pytest.mark.parametrize(
    ("make_model", "prompt", "other", "options"),
    [
        (with_two, PROMPTS[0], PROMPTS[0], {"adapter_names": ["other"]}),
        (lambda: with_two(kind="saved"), PROMPTS[0], PROMPTS[0], {"adapter_names": ["other"]}),
        (_invoked, [5, 6, 7, 8], [5, 6, 8, 7], {}),
    ],
    ids=["lora", "saved", "begins within the prompt"],
)
def test_a_request_with_an_adapter_that_fails(
    make_model: Callable[[], Any], prompt: list[int], other: list[int], options: dict[str, Any]
) -> None:
    """It fails alone: peft leaves the hooks of a call that fails, and every later call would have that adapter, or
    would have it begin there.
    """
    model = make_model()
    before = alone(model, other, **LONG)

    def fails(ids: torch.Tensor, scores: torch.Tensor, **given: Any) -> torch.Tensor:
        raise RuntimeError("no more")

    with fastgen.Engine(model, slots=8) as engine:
        with pytest.raises(RuntimeError, match="no more"):
            engine.submit(prompt, stopping_criteria=[fails], **options, **LONG).result(WAIT)
        assert torch.equal(engine.submit(other, **LONG).result(WAIT), before)
        assert engine.stats()["executor"] == ("slots" if options else "static batches")
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_learned_prompts_have_calls_of_their_own(name: str, kind: str) -> None:
    config = getattr(peft, kind)(num_virtual_tokens=4, task_type=FAMILIES[name][0])
    model = peft.get_peft_model(copy.deepcopy(BY_NAME[name].build()), config).eval()
    draw(model, 1)
    try:
        expected = [alone(model, prompt, max_new_tokens=8) for prompt in PROMPTS[:2]]
    except Exception as error:
        pytest.skip(f"peft cannot generate with it here: {error!r}")
    with fastgen.Engine(model) as engine:
        found = engine.generate(PROMPTS[:2], max_new_tokens=8)
        reason = f"adapters of the kind {config.peft_type.value.lower()}"
        assert engine.stats()["alone"] == {reason: 2} and reason in engine.stats()["why"]
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


def test_adapters_that_begin_within_the_prompt() -> None:
    model = _invoked()
    expected, without = (alone(model, prompt, **LONG) for prompt in ([5, 6, 7, 8], [5, 6, 8, 7]))
    with fastgen.Engine(model) as engine:
        found = engine.generate([[5, 6, 7, 8], [5, 6, 8, 7]], **LONG)
        (reason,) = engine.stats()["alone"]
    assert "alora_invocation_tokens" in reason
    assert torch.equal(found[0], expected) and torch.equal(found[1], without)


def test_a_generation_config_of_its_own() -> None:
    """peft hands it on for decoders, and not for encoder-decoder models."""
    for name in ("llama", "bart"):
        model = adapted(name)
        model.generation_config = GenerationConfig(max_new_tokens=3, eos_token_id=None, pad_token_id=0)
        with fastgen.Engine(model) as engine:
            found = engine.submit(PROMPTS[0]).result(WAIT)
        assert torch.equal(found, alone(model, PROMPTS[0]))
        assert (found.shape[1] == len(PROMPTS[0]) + 3) is (name == "llama")


def test_what_generate_refuses_is_refused() -> None:
    model = adapted("llama")
    with fastgen.Engine(model, slots=4) as engine:
        for options in ({"no_such_option": 1}, {"num_beams": 5}, {"max_new_tokens": 0}):
            with pytest.raises(ValueError, match=next(iter(options))):
                engine.submit(PROMPTS[0], **options)


def test_a_generate_of_the_users() -> None:
    class Own(peft.PeftModelForCausalLM):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)[:, :-1]

    config = config_of("llama")
    model = Own(copy.deepcopy(BY_NAME["llama"].build()), config).eval()
    with fastgen.Engine(model) as engine:
        found = engine.submit({"input_ids": PROMPTS[0]}, **LONG).result(WAIT)
        assert engine.stats()["alone"] == {"Own has a generate of its own": 1}
    assert torch.equal(found, alone(model, PROMPTS[0], **LONG))


def test_generate_batch_and_decode() -> None:
    """peft hands on the one to the model inside, and so `generate` does with the loop."""
    model = adapted("llama")
    fastgen.reset_stats()
    outputs = model.generate_batch(PROMPTS, max_new_tokens=12, num_beams=2)
    assert fastgen.stats()["transformers.generate_batch"]["accelerated"] == 1
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        expected = alone(model, prompt, max_new_tokens=12, num_beams=2, attention_mask=torch.ones(1, len(prompt)))
        written = expected[0, len(prompt) :].tolist()
        assert output.generated_tokens == written[: len(output.generated_tokens)] and output.generated_tokens
    fastgen.enable(captured_step="always")
    fastgen.disable()
    fastgen.reset_stats()
    ids = torch.tensor([PROMPTS[0]])
    found = model.generate(input_ids=ids, custom_generate=fastgen.decode, **LONG)
    assert fastgen.stats()["transformers.captured_step"]["accelerated"] == 1
    assert torch.equal(found, alone(model, PROMPTS[0], **LONG))
