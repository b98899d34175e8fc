"""Models of classes that a user, or another library, has derived from the library's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import fastgen
from fastgen import counters, settings
from tests.equivalence.captured import captures, reasons
from tests.equivalence.check import accelerated, check
from tests.equivalence.composites import MODELS, build, options
from tests.equivalence.models import BY_NAME
from tests.equivalence.test_programs import programs  # noqa: F401 (steps are recorded at once)

SEARCHES = ({"do_sample": False}, {"num_beams": 3})
STEPS = {"max_new_tokens": 16}


def derived(model: Any, **attributes: Any) -> Any:
    """The model, with a class of its own below the library's."""
    model.__class__ = type("Derived", (type(model),), {"__module__": __name__, **attributes})
    return model


def llama(**attributes: Any) -> Any:
    return derived(copy.deepcopy(BY_NAME["llama"].build()), **attributes)


@pytest.mark.parametrize("name", ["vit and trocr", "donut", "moonshine", "roberta and roberta", "speech to text"])
def test_what_is_known_of_the_librarys_class_holds(name: str, programs: None) -> None:  # noqa: F811
    """As of manga-ocr's, which adds nothing to a VisionEncoderDecoderModel."""
    make, inputs = MODELS[name]
    model = derived(build(make))
    for search in SEARCHES:
        check(model, inputs(), {**options(name, search), **STEPS})
    assert captures() == len(SEARCHES), reasons()


def test_nothing_is_drafted_where_the_librarys_class_counts_positions(programs: None) -> None:  # noqa: F811
    make, inputs = MODELS["roberta and roberta"]
    model = derived(build(make))
    derived(model.decoder)
    with settings.changed(self_speculation="int8"):
        check(model, inputs(), {"max_new_tokens": 24})
    assert list(fastgen.stats()[counters.DRAFTS]["not used"]) == [
        "positions that the model counts from what it has stored and the tokens of a pass"
    ]


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams"])
def test_a_mask_that_the_librarys_class_does_not_read(search: dict[str, Any], programs: None) -> None:  # noqa: F811
    model, inputs = derived(copy.deepcopy(BY_NAME["whisper"].build())), BY_NAME["whisper"].make_inputs()
    mask = torch.ones(len(inputs["input_features"]), inputs["input_features"].shape[-1], dtype=torch.long)
    mask[0, -6:] = 0
    check(model, {**inputs, "attention_mask": mask}, {**search, **STEPS})
    assert captures() == 1, reasons()


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, *args, **kwargs, repetition_penalty=1.3)


ADDED = {
    "a method": {"answer": lambda model, question: question},
    "a property": {"question": property(lambda model: 1), "QUESTIONS": (1, 2)},
    "generate": {"generate": _generate},
}


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams"])
@pytest.mark.parametrize("added", ADDED)
def test_what_no_forward_pass_calls_may_be_added(added: str, search: dict[str, Any], programs: None) -> None:  # noqa: F811
    check(llama(**ADDED[added]), BY_NAME["llama"].make_inputs(), {**search, **STEPS})
    assert captures() == 1, reasons()


def _continuations(model: Any, **kwargs: Any) -> Any:
    return GenerationMixin._get_top_k_continuations(model, **kwargs)


def _attribute(model: Any, name: str) -> Any:
    return torch.nn.Module.__getattr__(model, name)


REPLACED = {
    "a part of the loop": {"_get_top_k_continuations": _continuations},
    "how attributes are found": {"__getattr__": _attribute},
    "what the library asks for by its name": {"hf_device_map": {"": "cpu"}},
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_what_the_librarys_code_may_call_is_not_captured(replaced: str, programs: None) -> None:  # noqa: F811
    check(llama(**REPLACED[replaced]), BY_NAME["llama"].make_inputs(), {"num_beams": 3, **STEPS})
    assert accelerated() == 1 and list(reasons()) == ["a class that is none of the libraries' (Derived)"]
