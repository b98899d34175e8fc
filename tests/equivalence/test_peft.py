"""Models with adapters of peft: the library's tokens, whichever adapter is active, and however it has been changed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastgen
from tests import near_ties
from tests.equivalence.models import BY_NAME
from tests.equivalence.test_programs import programs  # noqa: F401 (steps are recorded at once)

peft = pytest.importorskip("peft", reason="peft is not there")

SEARCHES = ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True})
# Of each family: the layers that (IA)^3 scales, and those of them that end a feed-forward block.
SCALED = {
    "llama": (["q_proj", "v_proj", "down_proj"], ["down_proj"]),
    "bart": (["q_proj", "v_proj", "fc2"], ["fc2"]),
    "t5": (["q", "v", "wo"], ["wo"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
}
KINDS: dict[str, Callable[[str], Any]] = {
    "lora": lambda name: peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "dora": lambda name: peft.LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
    "tokens": lambda name: peft.LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=[5, 20, 33]),
    "ia3": lambda name: peft.IA3Config(target_modules=SCALED[name][0], feedforward_modules=SCALED[name][1]),
}
PROMPTS = {"prefix": "PrefixTuningConfig", "prompt": "PromptTuningConfig"}


@pytest.fixture(params=["never", "always"], autouse=True)
def captured_step(request: pytest.FixtureRequest) -> Iterator[str]:
    fastgen.enable(captured_step=request.param)
    yield request.param
    fastgen.enable(captured_step="auto")


def fill(model: Any, seed: int) -> None:
    """Adapters begin as what changes nothing: here, each changes the tokens in its own way."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "prompt_", "trainable_tokens_")):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + ("ia3_" in name))


def adapted(name: str, kind: str) -> Any:
    """A model with two adapters, "default" and "other"."""
    model = peft.get_peft_model(copy.deepcopy(BY_NAME[name].build()), KINDS[kind](name))
    fill(model, 1)
    active = {id(parameter) for parameter in model.parameters()}
    model.add_adapter("other", KINDS[kind](name))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in active:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tokens(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Those of the library, or of a near-tie."""

    def run() -> Any:
        torch.manual_seed(0)
        return model.generate(**copy.deepcopy(inputs), **options, max_new_tokens=10)

    return near_ties.check(run).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCALED)
def test_adapters_in_turn_switched_off_and_merged(name: str, kind: str, captured_step: str) -> None:
    """In one of the searches for each family and kind."""
    options = SEARCHES[([*SCALED].index(name) + [*KINDS].index(kind)) % len(SEARCHES)]
    model, inputs = adapted(name, kind), BY_NAME[name].make_inputs(3)
    fastgen.reset_stats()
    first = tokens(model, inputs, options)
    for _ in range(2):
        model.set_adapter("other")
        assert tokens(model, inputs, options) != first
        model.set_adapter("default")
        assert tokens(model, inputs, options) == first
    with model.disable_adapter():
        assert tokens(model, inputs, options) != first
    model.merge_adapter()
    tokens(model, inputs, options)
    model.unmerge_adapter()
    tokens(model, inputs, options)
    found = fastgen.stats()
    assert not found["transformers.generate"]["fallback"]
    if captured_step == "always":
        assert found["transformers.captured_step"]["accelerated"] == found["transformers.generate"]["accelerated"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_adapter_added_in_evaluation_mode(dropout: float) -> None:
    """peft leaves its parts in training mode: its dropout is at work, its products are the same."""
    model = peft.get_peft_model(copy.deepcopy(BY_NAME["llama"].build()), KINDS["lora"]("llama")).eval()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout))
    fill(model, 1)
    inputs = BY_NAME["llama"].make_inputs(3)
    fastgen.reset_stats()
    for adapter in ("other", "default"):
        model.set_adapter(adapter)
        tokens(model, inputs, SEARCHES[0])
    assert fastgen.stats()["transformers.generate"]["accelerated"] == (2 if dropout == 0 else 0)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_changed_adapter(name: str) -> None:
    model, inputs = adapted(name, "lora"), BY_NAME[name].make_inputs(3)
    seen = [tokens(model, inputs, SEARCHES[0])]

    def in_place() -> None:
        with torch.no_grad():
            for parameter in (each for key, each in model.named_parameters() if "lora_B.default" in key):
                parameter.mul_(-2)

    def scaling() -> None:
        for layer in model.modules():
            if isinstance(getattr(layer, "scaling", None), dict):
                layer.scaling["default"] *= 3

    def replaced() -> None:
        for layer in model.modules():
            if "default" in getattr(layer, "lora_A", {}):
                layer.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A["default"].weight.detach() * -1)

    for change in (in_place, scaling, replaced, lambda: fill(model, 5), lambda: model.delete_adapter("default")):
        change()
        seen.append(tokens(model, inputs, SEARCHES[0]))
    assert all(before != after for before, after in itertools.pairwise(seen))


def test_other_trained_tokens(captured_step: str) -> None:
    """Their numbers are in no tensor of the model: peft makes one of them in each pass."""
    model, inputs = adapted("llama", "tokens"), BY_NAME["llama"].make_inputs(3)
    seen = [tokens(model, inputs, SEARCHES[0])]
    for indices in ([6, 20, 33], [6, 21, 34], [5, 20, 33]):
        for layer in model.modules():
            if "default" in getattr(layer, "token_indices", {}):
                layer.token_indices["default"][:] = indices
        seen.append(tokens(model, inputs, SEARCHES[0]))
    assert seen[0] == seen[-1] and seen[0] != seen[2]
    if captured_step == "always":
        assert fastgen.stats()["transformers.captured_step"]["accelerated"] >= len(seen)


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_learned_prompts_run_on_the_librarys_code(name: str, kind: str) -> None:
    task = "SEQ_2_SEQ_LM" if name == "bart" else "CAUSAL_LM"
    config = getattr(peft, PROMPTS[kind])(num_virtual_tokens=4, task_type=task)
    model = peft.get_peft_model(copy.deepcopy(BY_NAME[name].build()), config).eval()
    fill(model, 1)
    inputs = BY_NAME[name].make_inputs(2)
    fastgen.reset_stats()

    def run() -> Any:
        try:
            return model.generate(**inputs, do_sample=False, max_new_tokens=8).tolist()
        except Exception as error:  # some releases of peft and Transformers do not go together here
            return repr(error)

    with fastgen.disabled():
        expected = run()
    assert run() == expected
    assert not fastgen.stats().get("transformers.captured_step", {}).get("accelerated")


@pytest.mark.parametrize("options", [*SEARCHES, {"do_sample": True, "num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_an_adapter_for_each_row(name: str, options: dict[str, Any], captured_step: str) -> None:
    """peft's hooks know the rows of the caller's batch: nobody else puts other rows together, or tries to."""
    model, inputs = adapted(name, "lora"), BY_NAME[name].make_inputs(4)
    names = ["default", "other", "__base__", "other"]
    fastgen.reset_stats()
    assert tokens(model, inputs, {**options, "adapter_names": names}) != tokens(model, inputs, options)
    counts = fastgen.stats()["transformers.generate"]
    assert counts["fallback"] == {"hooks of peft give each row an adapter of its own": 1} and counts["accelerated"] == 1


def _lily() -> Any:
    return peft.LilyConfig(target_modules=["q_proj", "v_proj"])


def _pvera() -> Any:
    return peft.PveraConfig(target_modules=["q_proj", "v_proj"], sample_at_inference=True)


@pytest.mark.parametrize("options", SEARCHES, ids=str)
@pytest.mark.parametrize("make", [_lily, _pvera])
def test_adapters_that_do_not_treat_each_token_alike(make: Callable[[], Any], options: dict[str, Any]) -> None:
    """One mixes experts by the mean of all tokens of the batch, the other draws for each."""
    try:
        config = make()
    except AttributeError:
        pytest.skip("this release of peft has no such adapters")
    model = peft.get_peft_model(copy.deepcopy(BY_NAME["llama"].build()), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    inputs = BY_NAME["llama"].make_inputs(5)

    def run() -> Any:
        torch.manual_seed(0)
        return model.generate(**copy.deepcopy(inputs), **options, max_new_tokens=20).tolist()

    fastgen.reset_stats()
    found = run()
    assert fastgen.stats()["transformers.generate"]["fallback"] == {f"adapters of the kind {make.__name__[1:]}": 1}
    with fastgen.disabled():
        assert run() == found
