"""What stands for a function of the library looks like it: to pickle, to copy, to `inspect`, and to a compiler."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
import transformers

import fastgen
from fastgen import patching
from fastgen.optimizer import transformers as hooks
from tests.equivalence.encoder_models import build
from tests.equivalence.models import BY_NAME

PATCHES = {patch.name: patch for patch in hooks.patches() if patch.module.startswith("transformers.")}


def _function(name: str) -> Any:
    """The target of a patch as it is now; of a class or static method, the function in it."""
    patch = PATCHES[name]
    owner: Any = importlib.import_module(patch.module)
    *path, attribute = patch.target.split(".")
    for part in path:
        owner = getattr(owner, part)
    found = vars(owner).get(attribute) or vars(owner).get((patch.former or "").rpartition(".")[2])
    return getattr(found, "__func__", found)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_function_looks_like_the_original(name: str) -> None:
    try:
        function = _function(name)
    except ModuleNotFoundError:
        pytest.skip("this release does not have it")
    original = patching.original_of(function)
    assert original is not None and inspect.isfunction(function)
    assert inspect.signature(function) == inspect.signature(original)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(function, attribute) == getattr(original, attribute)
    if hasattr(original, "__wrapped__"):  # of `generate`, a way round `no_grad`
        assert function.__wrapped__ is original.__wrapped__


def test_bound_methods_can_be_pickled_and_copied() -> None:
    known, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs()
    expected = known.generate(**inputs)
    model = type(known)(known.config).eval()  # without what other tests have had the library hang on the known one
    model.load_state_dict(known.state_dict())
    model.generation_config = known.generation_config
    for method in (
        copy.deepcopy(model.generate),
        pickle.loads(pickle.dumps(model.generate)),
        functools.partial(copy.deepcopy(model).generate, do_sample=False),
        pickle.loads(pickle.dumps(functools.partial(model.generate, do_sample=False))),
    ):
        fastgen.reset_stats()
        assert torch.equal(method(**inputs), expected)
        assert fastgen.stats()["transformers.generate"]["accelerated"] == 1
    load = transformers.BertModel.from_pretrained
    assert pickle.loads(pickle.dumps(load)) == load and copy.deepcopy(load) == load


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


def test_a_compiled_call_of_generate() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].make_inputs()
    expected = model.generate(**inputs)
    torch._dynamo.reset()
    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    assert torch.equal(compiled.generate(**inputs, cache_implementation="static"), expected)
