"""What stands for a function of the library looks like it: to pickle, to copy, to `inspect`, and to a compiler."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastgen
from fastgen import patching
from fastgen.optimizer.transformers.captured import pays
from tests.conftest import ROOT
from tests.equivalence.encoder_models import build
from tests.equivalence.models import BY_NAME

pytestmark = pytest.mark.sampled(10)

# Modules of FastGen's own, and of packages that may be absent, are patched like the library's.
PATCHES = {patch.name: patch for patch in fastgen._patches.patches}


def _owner_and_attribute(name: str) -> tuple[Any, str]:
    """Where the target of a patch is. Skips where this environment does not have it, or it is not to be patched."""
    patch = PATCHES[name]
    try:
        importlib.import_module(patch.module)
    except ImportError as error:
        pytest.skip(f"{patch.module} cannot be imported: {error}")
    if patch.state != "applied" or patch._owner is None:
        pytest.skip(f"{name} is {patch.state}")
    found = vars(patch._owner)[patch._attribute]
    if patching.original_of(getattr(found, "__func__", found)) is None:
        # FairSeq's modules get other globals, which look like themselves.
        assert patch.module.partition(".")[0] in ("fairseq", "fairseq_cli"), name
        pytest.skip("nothing stands for the function: it is another one")
    return patch._owner, patch._attribute


def _is_pickled(value: Any) -> bool:
    try:
        return bool(pickle.loads(pickle.dumps(value)) == value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _looks(owner: Any, attribute: str) -> dict[str, Any]:
    """What can be seen of a function."""
    function, found = getattr(owner, attribute), {}
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        found[name] = getattr(function, name, None)
    # Of `generate`, a way round `no_grad`; otherwise how to look behind.
    beneath = getattr(function, "__wrapped__", None)
    is_ours = patching.original_of(getattr(function, "__func__", function)) is beneath
    found["__wrapped__"] = None if is_ours else beneath
    found["signature"] = inspect.signature(function)
    # Otherwise pickle looks for it in another module, or in the class that it is inherited from.
    if function.__qualname__.startswith(getattr(owner, "__qualname__", attribute)) and (
        inspect.isclass(owner) or owner.__name__ == function.__module__
    ):
        found["is pickled"] = _is_pickled(function)
    found["is copied"] = copy.deepcopy(function) == function
    found["kind"] = type(inspect.getattr_static(owner, attribute)), type(function)
    return found


@pytest.fixture
def disabled_afterwards_enabled() -> Any:
    yield
    fastgen.enable()


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_does_not_show(name: str, disabled_afterwards_enabled: Any) -> None:
    """What is seen of the function is as without FastGen, which leaves the very object behind."""
    owner, attribute = _owner_and_attribute(name)
    is_own = attribute in vars(owner)
    patched = _looks(owner, attribute)
    stand_in = vars(owner)[attribute]
    function = getattr(stand_in, "__func__", stand_in)
    fastgen.disable()
    original = getattr(owner, attribute)
    looks = _looks(owner, attribute)
    if name == "transformers.modeling_utils.PreTrainedModel.__call__":
        assert is_own and attribute not in vars(owner)  # it is inherited
    else:
        assert patching.original_of(function) is getattr(vars(owner)[attribute], "__func__", original)
    assert patched == looks
    fastgen.enable()
    fastgen.disable()
    assert inspect.getattr_static(owner, attribute) is not stand_in
    assert getattr(owner, attribute) == original


class _Twice:
    """Has what stands for a function: with this original, and a wrapper that tells what comes to it."""

    def __init__(self, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        self.wrapped = 0

        def target(*args: Any, **kwargs: Any) -> Any:
            return args[-1] * 2

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            self.wrapped += 1
            return wrapped(*args, **kwargs)

        monkeypatch.setattr(cells["original"], "cell_contents", target)
        monkeypatch.setattr(cells["wrapper"], "cell_contents", wrapper)
        monkeypatch.setattr(cells["inherits"], "cell_contents", None)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_passed_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what compiles, exports, traces or transforms the code around it; threads and forks meet the wrapper."""
    owner, attribute = _owner_and_attribute(name)
    stand_in = vars(owner)[attribute]
    function = getattr(stand_in, "__func__", stand_in)
    inner = _Twice(function, monkeypatch)

    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self, x) + 1

    x, model = torch.arange(3.0), Calls()
    assert torch.equal(model(x), 2 * x + 1) and inner.wrapped == 1
    torch._dynamo.reset()
    for found in (
        torch.compile(model, backend="eager", fullgraph=True)(x),
        torch.export.export(model, (x,), strict=True).module()(x),
        torch.export.export(model, (x,), strict=False).module()(x),
        torch.fx.symbolic_trace(model)(x),
        torch.func.vmap(model)(x),
        torch.func.grad(lambda y: model(y).sum())(x) * x + 1,
    ):
        assert torch.equal(found, 2 * x + 1)
    assert inner.wrapped == 1
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    thread.join()
    assert inner.wrapped == 2
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            model(torch.zeros(1))
            os._exit(inner.wrapped)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_leaf_of_a_traced_graph() -> None:
    class Top(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = build("Bert")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.encoder(ids)[0] * 2

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, transformers.PreTrainedModel) or super().is_leaf_module(module, name)

    top, ids = Top().eval(), torch.randint(4, 60, (2, 9))
    graph = Tracer().trace(top)
    assert [node.op for node in graph.nodes if node.target == "encoder"] == ["call_module"]
    assert torch.equal(torch.fx.GraphModule(top, graph)(ids), top(ids))


def test_vmap_over_the_parameters_of_an_encoder() -> None:
    model, ids = build("Bert"), torch.randint(4, 60, (2, 9))
    with torch.no_grad():
        for _ in range(pays.PASSES + 2):  # it is recorded
            expected = model(ids).last_hidden_state
        stacked = {name: torch.stack([value, value]) for name, value in model.named_parameters()}
        states = torch.func.vmap(lambda given: torch.func.functional_call(model, given, (ids,)).last_hidden_state)
        torch.testing.assert_close(states(stacked), torch.stack([expected, expected]))


@pytest.mark.parametrize("removed", ["fastgen", "everything"])
def test_an_import_after_the_modules_were_removed(removed: str, programs: Path) -> None:
    code = f"""
import sys, torch, transformers
from transformers import GenerationMixin, PreTrainedModel
original = vars(GenerationMixin)["generate"], vars(PreTrainedModel)["from_pretrained"], PreTrainedModel.__call__
import fastgen
import fastgen.ops.attention, fastgen.optimizer.transformers.generate
for name in [name for name in sys.modules if name.partition(".")[0] == "fastgen"]:
    if {removed!r} == "everything" or name == "fastgen":
        del sys.modules[name]
import fastgen
from tests.equivalence.models import BY_NAME
family = BY_NAME["gpt2"]
model, inputs = family.build(), family.make_inputs()
found = model.generate(**inputs, num_beams=2)
assert fastgen.stats()["transformers.generate"]["accelerated"] == 1, fastgen.stats()
fastgen.disable()
assert vars(GenerationMixin)["generate"] is original[0] and PreTrainedModel.__call__ is original[2]
assert type(vars(PreTrainedModel)["from_pretrained"]) is classmethod
assert vars(PreTrainedModel)["from_pretrained"].__func__ is original[1].__func__
assert torch.equal(found, model.generate(**inputs, num_beams=2))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([programs / "python", "-c", code], check=True, timeout=300, cwd=ROOT, env=environment)


def test_symbolic_tracing_is_seen_in_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 has a flag alone, 2.13 has it and a function, 2.15 the function alone."""
    tracer = torch.fx._symbolic_trace
    assert not patching._is_traced()
    monkeypatch.setattr(tracer, "is_fx_symbolic_tracing", lambda: True, raising=False)
    monkeypatch.delattr(tracer, "_is_fx_tracing_flag", raising=False)
    assert patching._is_traced()
    monkeypatch.delattr(tracer, "is_fx_symbolic_tracing")
    monkeypatch.setattr(tracer, "_is_fx_tracing_flag", True, raising=False)
    assert patching._is_traced()


class _Graphs:
    """A compiler that runs what it gets as it is, and counts the operations."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.sizes.append(len(graph.graph.nodes))
        return graph.forward


def _compiled(model: Any, inputs: dict[str, Any], train: bool) -> tuple[Any, list[int]]:
    torch._dynamo.reset()
    graphs = _Graphs()
    result = torch.compile(model, backend=graphs, fullgraph=True)(**inputs)
    logits = result.logits
    if train:
        model.zero_grad()
        logits.float().square().mean().backward()
        logits = torch.cat(
            [logits.detach().flatten(), *(p.grad.flatten() for p in model.parameters() if p.requires_grad)]
        )
    return logits.detach(), graphs.sizes


@pytest.mark.sampled(10)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["bart", "t5", "llama", "gpt2", "Bert"])
def test_a_compiler_finds_the_librarys_code(name: str, train: bool) -> None:
    if name == "Bert":
        model, inputs = build("Bert"), {"input_ids": torch.randint(4, 60, (2, 9))}
        model = transformers.BertForMaskedLM(model.config).eval()
    else:
        model, inputs = copy.deepcopy(BY_NAME[name].build()), BY_NAME[name].make_inputs()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    inputs["use_cache"] = False
    if name == "Bert":
        del inputs["use_cache"]
    with torch.set_grad_enabled(train):
        fastgen.disable()
        try:
            expected = _compiled(model, inputs, train)
        finally:
            fastgen.enable()
        found = _compiled(model, inputs, train)
    assert found[1] == expected[1]  # the same graphs
    assert torch.equal(found[0], expected[0])
