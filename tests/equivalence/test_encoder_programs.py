"""Short passes of encoders that are recorded and repeated: the same results, whatever the tokens."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import fastgen
from fastgen.decoding.captured.graph import CapturedPart
from fastgen.optimizer.transformers import models
from fastgen.optimizer.transformers.captured import graph_cache, pays
from fastgen.optimizer.transformers.encoders import programs
from tests.equivalence.captured import need_programs, spoil_shared_memory
from tests.equivalence.encoder_models import OF_SEQ2SEQ, WITHOUT_PADDING, assert_close, both, build, class_of, inputs

pytestmark = pytest.mark.sampled(5)


@pytest.fixture(autouse=True)
def recorded_early(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded when they come for the second time, with FastGen's operators, and nothing is measured."""
    need_programs(device, monkeypatch)
    monkeypatch.setattr(pays, "PASSES", 2)
    graph_cache.drop_all()
    spoil_shared_memory(monkeypatch)


def _recorded() -> int:
    return fastgen.stats().get(programs.ENTRY_POINT, {}).get("accelerated", 0)


def _check(model: Any, given: dict[str, Any]) -> None:
    assert_close(*both(model, given))


MODELS = [(name, head) for name in WITHOUT_PADDING for head in ("", "SequenceClassification", "TokenClassification")]
MODELS = [each for each in MODELS if class_of(*each) is not None] + [(name, "") for name in OF_SEQ2SEQ]


@pytest.mark.parametrize(("architecture", "head"), MODELS)
def test_every_architecture(architecture: str, head: str) -> None:
    model = build(architecture, head)
    for length in (9, 9, 9, 17, 9, 17, 17):
        given = inputs([length, length])
        given["input_ids"] = given["input_ids"].roll(_recorded(), dims=1)
        _check(model, given)
    not_used = fastgen.stats().get(programs.ENTRY_POINT, {}).get("not used")
    assert _recorded() >= 2 or not_used, fastgen.stats()
    if architecture in ("Albert", "Bert", "DistilBert", "Electra", "MPNet", "Roberta", "XLMRoberta"):
        assert _recorded() >= 2, fastgen.stats()


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(build("Bert", "SequenceClassification"))


def _warm(model: Any) -> dict[str, Any]:
    given = inputs([9])
    for _ in range(3):
        _check(model, given)
    assert _recorded()
    return given


def test_results_are_not_overwritten(model: Any) -> None:
    given = _warm(model)
    with torch.inference_mode():
        first = model(**given).logits
        kept = first.clone()
        model(given["input_ids"].roll(1, dims=1))
    assert torch.equal(first, kept)


def test_weights_that_change(model: Any) -> None:
    given = _warm(model)
    with torch.no_grad():
        model.classifier.weight.data.mul_(-2.0)  # which torch does not count
    _check(model, given)
    model.classifier.weight = torch.nn.Parameter(torch.randn_like(model.classifier.weight))
    _check(model, given)
    model.bert.encoder.layer[0] = copy.deepcopy(model.bert.encoder.layer[1])
    _check(model, given)
    assert _recorded() >= 2


def test_hooks_and_training(model: Any) -> None:
    given, seen = _warm(model), []
    count = _recorded()
    for register in (model.bert.encoder.layer[0].register_forward_hook, register_module_forward_hook):
        seen.clear()
        with register(lambda *arguments: seen.append(1)), torch.inference_mode():
            model(**given)
        assert seen and _recorded() == count
    model.bert.pooler.train()
    with torch.inference_mode():
        model(**given)
    assert _recorded() == count
    with torch.enable_grad():
        assert model.eval()(**given).logits.requires_grad
    assert _recorded() == count


def test_other_arguments(model: Any) -> None:
    given = _warm(model)
    for more in ({"token_type_ids": torch.ones_like(given["input_ids"])}, {"output_hidden_states": True}):
        for _ in range(3):
            _check(model, {**given, **more})
    mask = given["attention_mask"].clone()
    mask[0, 3] = 0
    _check(model, {**given, "attention_mask": mask})
    _check(model, {"input_ids": given["input_ids"]})


def test_what_cannot_be_recorded_is_not_tried_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(programs._Pass, "run", lambda self, given: made.append(1))
    given = inputs([9])
    for _ in range(5):
        _check(model, given)
    assert made == [1] and not _recorded()


def test_so_many_are_kept(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST_PASSES", 2)
    for length in (5, 6, 7):
        for _ in range(3):
            _check(model, inputs([length]))
    assert len(graph_cache._models[model].steps) == 2
    fastgen.disable()
    fastgen.enable()
    assert not graph_cache._models


def test_code_of_others_runs_each_time(model: Any) -> None:
    """In a head of the user's, and in a layer of theirs: with what they do besides computing."""
    seen = []

    class Head(type(model)):  # type: ignore[misc]
        def forward(self, **given: Any) -> Any:
            seen.append(1)
            return super().forward(**given)

    with_head = Head(model.config).eval()
    model.classifier.forward = lambda x: (seen.append(1), type(model.classifier).forward(model.classifier, x))[1]
    for one in (model, with_head):
        seen.clear()
        with torch.inference_mode():
            for _ in range(5):
                one(**inputs([9]))
        assert len(seen) == 5 and not _recorded()


def test_memory_that_runs_out_for_a_recording_may_be_there_later(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(CapturedPart, "capture", fails)
        for _ in range(2):
            _check(model, inputs([9]))
    assert fastgen.stats()[programs.ENTRY_POINT]["not used"] == {"out of memory": 1}
    _warm(model)


def test_modules_are_those_of_the_model() -> None:
    """Also where one is in two places, and where a place is empty."""
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(shared, torch.nn.Sequential(torch.nn.ReLU(), shared), torch.nn.ModuleList())
    model.register_module("nothing", None)
    found = models.modules_of(model)
    assert len(found) == 5 and {*map(id, found)} == {*map(id, model.modules())}


def test_tensors_that_do_not_say_where_they_are(model: Any) -> None:
    """As quantised weights of other libraries: their model is never recorded."""

    class Odd(torch.Tensor):
        def data_ptr(self) -> int:
            raise RuntimeError("no memory of its own")

    weight = model.classifier.weight
    model.classifier.weight = torch.nn.Parameter(weight.detach().as_subclass(Odd), requires_grad=False)
    for _ in range(4):
        _check(model, inputs([9]))
    assert not _recorded()


def test_a_model_goes_when_its_user_lets_go_of_it(model: Any) -> None:
    mine = copy.deepcopy(model)
    _warm(mine)
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None
