"""Changed models and replaced functions: the results are never those of before.

test_changed_models_random.py makes each kind of change, and replaces each function. These tests are about what is
counted, kept and freed meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import wrapt
from torch import Tensor, nn

import fastgen
from fastgen.decoding.captured.graph import unavailable
from fastgen.engine import models
from fastgen.optimizer.transformers.captured import graph_cache, pays
from fastgen.optimizer.transformers.encoders import programs as encoder_programs
from tests.equivalence import encoder_models
from tests.equivalence.captured import BEAMS, GREEDY, build, captures, reasons
from tests.equivalence.check import accelerated, check, fallbacks, run
from tests.equivalence.models import BY_NAME
from tests.equivalence.test_programs import programs  # noqa: F401 (steps are recorded at once)

CPU = torch.device("cpu")
OPTIONS = {**GREEDY, "min_new_tokens": 24}


@pytest.fixture
def llama() -> Any:
    """A model whose step is captured, and inputs."""
    model, inputs = build(BY_NAME["llama"], CPU)
    check(model, inputs, OPTIONS)
    assert captures() == 1, reasons()
    return model, inputs


def _changes(model: Any, inputs: Any, before: Any) -> Any:
    """Asserts that both ways have one result, which is not that of before."""
    found = check(model, inputs, OPTIONS)
    assert found.tolist() != before.tolist()
    return found


def test_a_default_device_is_no_mode_of_the_users(llama: Any) -> None:
    model, inputs = llama
    with torch.device("cpu"):
        check(model, inputs, OPTIONS)
    assert captures() == 2, reasons()


def test_a_wrapped_function_runs_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(BY_NAME["llama"], CPU)
    model.set_attn_implementation("eager")
    softmax, calls = F.softmax, [0, 0]

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls[-1] += 1
        return softmax(*args, **kwargs)

    monkeypatch.setattr(F, "softmax", counting)
    for options in (GREEDY, BEAMS):
        found = []
        for context in (fastgen.disabled(), contextlib.nullcontext()):
            calls.append(0)
            with context:
                found.append(run(model, inputs, {**options, "min_new_tokens": 12}).tolist())
        assert found[0] == found[1] and calls[-1] == calls[-2] > 0


def test_attributes_that_no_code_names_change_nothing(llama: Any) -> None:
    """A user may count calls, or keep notes."""
    model, inputs = llama
    for number in range(3):
        model.calls_of_mine = number
        model.model.layers[0].mlp.notes_of_mine = [number]
        model.config.calls_of_mine = number
        check(model, inputs, OPTIONS)
    assert captures() == 4, reasons()
    assert len(graph_cache._models[model].steps) == 1 and not graph_cache._models[model].former


def test_states_that_a_model_goes_back_to(llama: Any) -> None:
    """As adapters that are used alternately: the steps of both are kept."""
    model, inputs = llama
    norm, found, steps = model.model.norm, [], []
    for number in range(4):
        norm.variance_epsilon = (3.0, 1e-6)[number % 2]
        found.append(check(model, inputs, OPTIONS).tolist())
        steps.append(next(iter(graph_cache._models[model].steps.values())))
    assert steps[0] is steps[2] and steps[1] is steps[3] and steps[0] is not steps[1]


# ---- encoders


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    if unavailable(CPU) is not None:
        pytest.skip("programs need the compiled operators")
    monkeypatch.setattr(pays, "PASSES", 2)
    graph_cache.drop_all()
    return copy.deepcopy(encoder_models.build("Bert", "SequenceClassification"))


def _encode(model: Any) -> None:
    """Asserts that the logits with FastGen are the library's."""
    found, expected = encoder_models.both(model, encoder_models.inputs([9]))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_an_attribute_that_changes_with_each_call_makes_no_recordings(encoder: Any) -> None:
    """The model's code names it, so the model runs on its own code."""
    layer = encoder.bert.encoder.layer[0].attention.self
    for number in range(24):
        layer.scaling = 0.1 + number / 100
        _encode(encoder)
    assert not any(of.steps for of in graph_cache._all())
    assert "the model changes from call to call" in fastgen.stats()[encoder_programs.ENTRY_POINT]["not used"]


def test_two_alternating_states_have_a_recording_each(encoder: Any) -> None:
    layer = encoder.bert.encoder.layer[0].attention.self
    for number in range(24):
        layer.scaling = (0.3, 3.0)[number % 2]
        _encode(encoder)
    assert sum(bool(of.steps) for of in graph_cache._all()) == 2


def test_an_attribute_that_counts_calls_keeps_the_recordings(encoder: Any) -> None:
    for number in range(8):
        encoder.calls_of_mine = encoder.bert.calls_of_mine = number
        _encode(encoder)
    assert fastgen.stats()[encoder_programs.ENTRY_POINT]["accelerated"] >= 5


def test_functions_that_others_have_wrapped(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy claims to be what it wraps, and so does a mock with a specification."""
    model, inputs = llama
    before = run(model, inputs, OPTIONS)
    for made in (
        wrapt.FunctionWrapper(F.silu, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) * -2.0),
        mock.Mock(spec=F.silu, side_effect=lambda x, **kwargs: torch.sigmoid(x) * x * -2.0),
        functools.partial(lambda x, inplace=False: torch.sigmoid(x) * x * -2.0),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(F, "silu", made)
            _changes(model, inputs, before)
    assert run(model, inputs, OPTIONS).tolist() == before.tolist()


def test_a_loss_that_is_replaced_changes_nothing(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries for training do: no step computes a loss."""
    model, inputs = llama
    monkeypatch.setattr(F, "cross_entropy", functools.wraps(F.cross_entropy)(lambda *args, **kwargs: 2.0))
    check(model, inputs, OPTIONS)
    assert captures() == 2, reasons()


def test_hooks_of_accelerate(llama: Any) -> None:
    """A user's hook, which accelerate calls around a forward pass."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = llama

    class Steering(hooks.ModelHook):
        by = 2.0

        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output.flip(-1) * self.by

    before, hook, mlp = run(model, inputs, OPTIONS), Steering(), model.model.layers[0].mlp
    hooks.add_hook_to_module(mlp, hook)
    before = _changes(model, inputs, before)
    hook.by = -7.0
    before = _changes(model, inputs, before)
    hooks.remove_hook_from_module(mlp)
    _changes(model, inputs, before)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_hooks_of_accelerate_that_are_removed(name: str) -> None:
    """The forward pass that was theirs to call stays behind as an attribute."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = build(BY_NAME[name], CPU)
    for part in model.modules():
        hooks.add_hook_to_module(part, hooks.ModelHook())
        hooks.remove_hook_from_module(part)
    assert "forward" in vars(model)
    for number, options in enumerate((OPTIONS, BEAMS), 1):
        check(model, inputs, options)
        assert accelerated() == captures() == number and not fallbacks(), fallbacks()
    assert models.alone_for_model(model) is None


def test_a_model_that_its_layer_knows_goes_with_its_user(llama: Any) -> None:
    model, inputs = build(BY_NAME["llama"], CPU)
    model.model.layers[0].owner_of_mine = [model]
    check(model, inputs, OPTIONS)
    gone = weakref.ref(model)
    graph_cache.drop_all()
    del model
    gc.collect()
    assert gone() is None


def test_a_deleted_layer(llama: Any) -> None:
    """Pruned by hand, with a configuration that still counts it: a layer of the cache stays empty."""
    model, inputs = llama
    fastgen.reset_stats()
    before = model.generate(**inputs, **OPTIONS)
    del model.model.layers[0]
    for options in (OPTIONS, {**OPTIONS, "num_beams": 3}):
        check(model, inputs, options)
    _changes(model, inputs, before)
    assert accelerated() == 4 and not fallbacks()
