"""What may change in a model between two calls, and that it is seen."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastgen import settings
from fastgen.decoding import guards as of_models
from fastgen.decoding.layers import Replacement
from fastgen.decoding.library_code import Reached
from fastgen.ops.linear import choose
from fastgen.optimizer.transformers.call import fast_layers
from tests.equivalence.models import BY_NAME


class Everything:
    """Contains the name of every attribute."""

    def __contains__(self, name: object) -> bool:
        return True


state_of = functools.partial(of_models.state_of, names=Everything())


class Kind(enum.Enum):
    ONE, OTHER = 1, 2


class Config:
    """As those of Transformers, one inside another."""

    model_type = "inner"

    def __init__(self) -> None:
        self.shift = 1.0


class Scaled:
    """A function that is an object."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


def closure(value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * value


class Gate(nn.Module):
    """A layer with attributes of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.active, self.factor, self.names, self.shares = True, 0.5, ["first"], {"first": 1.0}
        self.function, self.kind, self.dtype = torch.relu, Kind.ONE, torch.float32
        self.sizes, self.known = (2, 3), {"first"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) * self.scale * self.factor + self.offset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(attention="sdpa", labels={0: "a"}, sizes=[1, 2], inner=Config())
        self.layers = nn.ModuleList([nn.Linear(4, 4), Gate(), nn.LayerNorm(4)])
        self.gate = self.layers[1]


def _exchange_class(model: Model) -> None:
    model.layers[0].__class__ = type("Other", (nn.Linear,), {})


def _exchange_order(model: Model) -> None:
    first = model.layers[0]
    del model.layers._modules["0"]
    model.layers._modules["0"] = first


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a module": lambda model: model.layers.__setitem__(0, nn.Linear(4, 4)),
    "another module": lambda model: model.layers.append(nn.ReLU()),
    "one module less": lambda model: model.layers.__delitem__(2),
    "the order of modules": _exchange_order,
    "a class": _exchange_class,
    "a forward pass of its own": lambda model: setattr(model.layers[0], "forward", torch.relu),
    "a parameter": lambda model: setattr(model.layers[0], "weight", nn.Parameter(model.layers[0].weight + 0)),
    "an equal parameter of one number": lambda model: setattr(model.gate, "scale", nn.Parameter(torch.ones(1))),
    "an equal buffer of one number": lambda model: setattr(model.gate, "offset", torch.zeros(())),
    "a buffer where there was none": lambda model: setattr(model.gate, "nothing", torch.zeros(())),
    "one parameter less": lambda model: setattr(model.layers[0], "bias", None),
    "the memory of a parameter": lambda model: setattr(model.layers[0].weight, "data", torch.zeros(4, 4)),
    "the layout of a parameter": lambda model: setattr(model.layers[0].weight, "data", model.layers[0].weight.data.t()),
    "the type of all": lambda model: model.half(),
    "a number": lambda model: setattr(model.gate, "factor", 0.25),
    "a flag": lambda model: setattr(model.gate, "active", False),
    "a function": lambda model: setattr(model.gate, "function", torch.tanh),
    "a member of an enumeration": lambda model: setattr(model.gate, "kind", Kind.OTHER),
    "a type": lambda model: setattr(model.gate, "dtype", torch.float16),
    "a list": lambda model: model.gate.names.append("second"),
    "a dictionary": lambda model: model.gate.shares.update(first=2.0),
    "a tuple": lambda model: setattr(model.gate, "sizes", (2, 4)),
    "a set": lambda model: model.gate.known.add("second"),
    "an attribute more": lambda model: setattr(model.gate, "more", 1),
    "an attribute less": lambda model: delattr(model.gate, "factor"),
    "an attribute of the model": lambda model: setattr(model, "more", 1),
    "the configuration": lambda model: setattr(model.config, "attention", "eager"),
    "a list of the configuration": lambda model: model.config.sizes.append(3),
    "a configuration in the configuration": lambda model: setattr(model.config.inner, "shift", 2.0),
    "another configuration": lambda model: setattr(model, "config", types.SimpleNamespace(attention="eager")),
}


def _written_cell(model: Model) -> None:
    model.gate.function.__closure__[0].cell_contents = 2.0


def _same_address(model: Model) -> None:
    """Another function, where the one before it may have been: its `id` is no sign."""
    del model.gate.function
    model.gate.function = closure(1.0)


# Where something that is called has taken the place of `function`: what it is, and a change of it.
CALLED: dict[str, tuple[Callable[[], Any], Callable[[Model], Any]]] = {
    "another partial": (
        lambda: functools.partial(torch.add, alpha=1),
        lambda model: setattr(model.gate, "function", functools.partial(torch.add, alpha=2)),
    ),
    "an attribute of an object": (Scaled, lambda model: setattr(model.gate.function, "factor", 2.0)),
    "of a method's owner": (lambda: Scaled().twice, lambda model: setattr(model.gate.function.__self__, "factor", 2.0)),
    "another method": (
        lambda: Scaled().twice,
        lambda model: setattr(model.gate, "function", model.gate.function.__self__.__call__),
    ),
    "a variable of a closure": (lambda: closure(1.0), _written_cell),
    "another closure": (lambda: closure(1.0), lambda model: setattr(model.gate, "function", closure(2.0))),
    "the next function": (lambda: closure(1.0), _same_address),
}


@pytest.mark.parametrize("what", CALLED)
def test_what_is_called_is_looked_into(what: str) -> None:
    make, change = CALLED[what]
    model = Model().eval()
    model.gate.function = make()
    state = state_of(model)
    assert state_of(model) == state
    change(model)
    assert state_of(model) != state


class Tokenizer:
    """It can be called, and has learned something new with each text."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        return self.known.setdefault(text, text)


def test_what_changes_with_each_call_is_not_looked_at() -> None:
    """Or each call would make another recording: counters of a forward pass, and what a tokenizer remembers."""
    model, calls = Model().eval(), 0
    forward = model.layers[0].forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(x)

    model.layers[0].forward, model.tokenizer = counted, Tokenizer()
    state = state_of(model)
    model.layers[0](torch.zeros(1, 4))
    model.tokenizer("a text")
    assert calls == 1 and state_of(model) == state


def test_closures_that_know_themselves() -> None:
    model = Model().eval()
    model.gate.function = lambda x: model.gate.function(x)
    model.gate.names.append(model.gate.function)
    assert state_of(model) == state_of(model)


def test_forward_passes_of_fastgens_are_none_of_the_models() -> None:
    model = Model().eval()
    state = state_of(model)
    model.layers[0].forward = Replacement(model.layers[0])
    assert state_of(model) == state


def test_a_forward_pass_that_knows_its_model_does_not_keep_it() -> None:
    model = Model().eval()
    model.layers[0].forward = _knowing(model)
    kept, state = weakref.ref(model), state_of(model)
    del model
    gc.collect()
    assert kept() is None and state


@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_seen(what: str) -> None:
    model = Model().eval()
    state = state_of(model)
    assert state_of(model) == state
    CHANGES[what](model)
    assert state_of(model) != state


def test_what_is_written_into_parameters_is_no_change() -> None:
    model = Model().eval()
    state = state_of(model)
    with torch.no_grad():
        model.layers[0].weight.mul_(2.0)
        model.gate.scale.data.fill_(3.0)
    assert state_of(model) == state


def test_hooks_and_modes() -> None:
    model = Model().eval()
    state = state_of(model)
    for register in (model.layers[0].register_forward_hook, model.register_forward_pre_hook):
        hook = register(lambda *arguments: None)
        assert state_of(model) != state
        hook.remove()
        assert state_of(model) == state
    model.gate.train()
    assert state_of(model) != state
    model.eval()
    assert state_of(model) == state


def test_hooks_that_pass_outputs_on_are_no_change() -> None:
    """The library leaves them on a model once somebody has asked for hidden states."""
    model, ids = copy.deepcopy(BY_NAME["llama"].build()), torch.tensor([[5, 6]])
    state = of_models.GuardedModel.of(model).check(model)
    assert model(ids, output_hidden_states=True).hidden_states
    assert any(module._forward_hooks for module in model.modules())
    names = Reached.of(model).names
    assert of_models.state_of(model, names) == state.model
    hook = model.model.layers[0].register_forward_hook(lambda *arguments: None)
    assert of_models.state_of(model, names) != state.model
    hook.remove()
    assert of_models.GuardedModel.of(model).check(model) is state


def test_settings() -> None:
    model = Model().eval()
    state = state_of(model)
    for change in ({"packed_weights": "never"}, {"weight_dtype": "int8"}):
        with settings.changed(**change):
            assert state_of(model) != state
    assert state_of(model) == state


@pytest.mark.skipif(not choose.is_available(), reason="there are no kernels")
def test_layers_have_other_forms_in_each_call() -> None:
    """While a model generates, FastGen's forms stand for the forward passes of its layers: they are no change."""
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU()).eval()
    model.config = types.SimpleNamespace()
    with fast_layers(model):
        assert isinstance(vars(model[0])["forward"], Replacement)
        state = state_of(model)
    with fast_layers(model):
        assert state_of(model) == state
        model[0].forward = nn.Linear.forward.__get__(model[0])
        assert state_of(model) != state
    del model[0].forward
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and state


def test_tensors_among_attributes() -> None:
    """Their memory counts, not what is written there."""
    model = Model().eval()
    model.gate.kept = [torch.ones(1)]
    state, before = state_of(model), model.gate.kept[0]
    before.fill_(2.0)
    assert state_of(model) == state
    model.gate.kept = [before.clone()]
    assert state_of(model) != state


def _knowing(model: Model) -> Callable[[], Model]:
    return lambda: model


def test_a_method_that_a_module_holds_is_compared() -> None:
    """Accelerate leaves such a forward pass behind. One of another module may refer to the model."""
    model = Model()
    gate = next(each for each in model.children() if isinstance(each, Gate))
    gate.forward = gate.forward  # type: ignore[method-assign]
    state = state_of(model)
    assert state_of(model) == state
    gate.forward = model.forward  # type: ignore[method-assign]
    assert state_of(model) != state


@pytest.mark.parametrize("way", ["a method", "a function that has it", "a list", "a hook", "none"])
def test_the_model_is_not_held(way: str) -> None:
    """Not even where one of its modules knows it."""
    model = Model().eval()
    if way == "a hook":
        model.gate.register_forward_hook(types.MethodType(lambda *arguments: None, model))
    elif way == "a method":
        model.gate.known = types.MethodType(Model.forward, model)
    elif way == "a function that has it":
        model.gate.known = _knowing(model)
    elif way == "a list":
        model.gate.known = [types.MethodType(Model.forward, model)]
    gone, state = weakref.ref(model), state_of(model)
    del model
    gc.collect()
    assert gone() is None and state


def test_a_model_that_alternates_between_classes_is_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    guarded, mlp = of_models.GuardedModel.of(model), model.model.layers[0].mlp
    kinds = nn.SiLU(), nn.GELU()
    states = []
    for kind in kinds:
        mlp.act_fn = kind
        states.append(guarded.check(model))
    assert states[0] != states[1]
    monkeypatch.setattr(guarded, "_new_state", lambda model: pytest.fail("both states are known"))
    for kind, state in zip(kinds * 2, states * 2, strict=True):
        mlp.act_fn = kind
        assert guarded.check(model) is state
