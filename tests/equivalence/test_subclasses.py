"""Models of classes that a user, or another library, has derived from the library's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import fastgen
from fastgen import counters, releases, settings
from tests.equivalence.captured import captures, reasons
from tests.equivalence.check import accelerated, check, fallbacks
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


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    output = LlamaForCausalLM.forward(model, *args, **kwargs)
    output.logits = -output.logits
    return output


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    output = torch.nn.Module.__call__(model, *args, **kwargs)
    output.logits = -output.logits
    return output


@pytest.mark.parametrize("name", ["forward", "__call__"])
def test_a_class_gets_a_method_after_a_captured_call(name: str, programs: None) -> None:  # noqa: F811
    model, inputs = llama(), BY_NAME["llama"].make_inputs()
    check(model, inputs, {"do_sample": False, **STEPS})
    assert captures() == 1, reasons()
    setattr(type(model), name, {"forward": _forward, "__call__": _call}[name])
    check(model, inputs, {"do_sample": False, **STEPS})


class _Continues:
    """A model whose own `generate` runs the library's loop as often as it likes, on one cache of its own."""

    @torch.no_grad()
    def generate(self: Any, input_ids: torch.Tensor, lengths: Sequence[int], **kwargs: Any) -> Any:
        config, _ = self._prepare_generation_config(None, eos_token_id=None, **kwargs)
        self._prepare_special_tokens(config, True, device=input_ids.device)
        given = releases.with_cache(DynamicCache(config=self.config))
        for new in lengths:
            most = input_ids.shape[1] + new
            config.max_length = kwargs.get("max_length", most)
            input_ids = self._sample(
                input_ids,
                logits_processor=LogitsProcessorList(),
                stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(most)]),
                generation_config=config,
                attention_mask=torch.ones(len(input_ids), input_ids.shape[1], dtype=torch.long),
                use_cache=True,
                **given,
            )
        return input_ids, [(layer.get_seq_length(), layer.keys) for layer in releases.cache_in(given).layers]


def _check_continued(name: str, **options: Any) -> None:
    family = BY_NAME[name]
    model = derived(copy.deepcopy(family.build()), generate=_Continues.generate)
    given, found = {"input_ids": torch.arange(4, 18).view(2, 7), **options}, []
    for run in (fastgen.disabled, contextlib.nullcontext):
        torch.manual_seed(0)
        with run():
            found.append(model.generate(**copy.deepcopy(given)))
    (expected, expected_cache), (tokens, cache) = found
    assert torch.equal(tokens, expected)
    for (length, keys), (wanted, expected_keys) in zip(cache, expected_cache, strict=True):
        assert length == wanted and torch.allclose(keys, expected_keys, atol=1e-4)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("captured_step", ["never", "always"])
def test_a_generate_of_ones_own_that_goes_on_with_its_cache(captured_step: Any, options: dict[str, Any]) -> None:
    with settings.changed(captured_step=captured_step):
        _check_continued("llama", lengths=(20, 12, 9), **options)
    assert accelerated() == 3 and not fallbacks(), fallbacks()


@pytest.mark.parametrize("max_length", [None, 9], ids=str)
def test_a_loop_that_runs_beyond_the_max_length_of_its_config(max_length: int | None) -> None:
    """And beyond a sliding window: with that length, it would end in front of it."""
    _check_continued("mistral-short-window", lengths=(60,), max_length=max_length, do_sample=False)
    assert accelerated() == 0 and "beyond the max_length of its config" in next(iter(fallbacks()))
