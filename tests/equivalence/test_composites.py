"""Models made of two: images, sounds or text in, text out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.blip import modeling_blip_text

import fastgen
from fastgen import counters, settings
from tests.equivalence.captured import captures, reasons
from tests.equivalence.cases import DECODING, draws_others
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.composites import MODELS, bert_and_rembert, build, idefics, of_idefics, options, tokens
from tests.equivalence.models import LONG

# Earlier releases of BLIP make masks for as many positions as the cache says that it has.
MAKES_MASKS = hasattr(modeling_blip_text, "create_causal_mask")
SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", MODELS)
def test_models_made_of_two(name: str, decoding: str) -> None:
    make, inputs = MODELS[name]
    check(build(make), inputs(), {**options(name, DECODING[decoding]), **SCORES})
    assert accelerated() == 1


@pytest.mark.sampled(12, skips=draws_others)
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", MODELS)
def test_their_steps_are_captured(name: str, decoding: str, way: str) -> None:
    """Twice, so that a step that is kept serves a call of fewer inputs, too."""
    (make, inputs), given = MODELS[name], {**options(name, DECODING[decoding]), **SCORES}
    check(build(make), inputs(), given)
    check(build(make), {key: value[1:] for key, value in inputs().items()}, given)
    if MAKES_MASKS or not name.startswith("blip"):
        assert captures() == 2, (reasons(), fallbacks())


def test_the_class_inside_decides_whether_steps_are_captured(way: str) -> None:
    check(build(bert_and_rembert), tokens(2, LONG, 20), SCORES)
    assert accelerated() == 1 and captures() == 0
    assert list(reasons()) == ["a model that the library does not run with a static cache"]


def test_a_model_that_hands_on_more_than_its_cache() -> None:
    """With several sequences for an input it is left to the original code."""
    model = build(idefics)
    check(model, of_idefics(), {"num_beams": 1, **SCORES})
    assert accelerated() == 1 and not fallbacks()
    check(model, of_idefics(), {"num_beams": 3})
    assert list(fallbacks()) == ["IdeficsForVisionText2Text hands on more than K/V from step to step"]


def _encoded(name: str) -> tuple[Any, Any, int]:
    """A model, what its encoder has made of its inputs, and of how many positions."""
    make, inputs = MODELS[name]
    model = build(make)
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs())
    return model, encoded, encoded[0].shape[1]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["vit and trocr", "donut", "moonshine"])
def test_a_mask_that_the_decoder_does_not_read(name: str, options: dict[str, Any], way: str) -> None:
    """It attends to all that the encoder gives, or to what the output of that says."""
    model, encoded, positions = _encoded(name)
    mask = torch.ones(2, positions, dtype=torch.int64)
    mask[1, positions // 2 :] = 0
    check(model, {"encoder_outputs": encoded, "attention_mask": mask}, {**options, **SCORES})
    check(model, {"encoder_outputs": encoded}, {**options, **SCORES})
    assert captures() == 2, (reasons(), fallbacks())


@pytest.mark.skipif(not MAKES_MASKS, reason="no step of this release's is captured")
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_mask_of_states(options: dict[str, Any], way: str) -> None:
    """BLIP's text model leaves it out: no step is captured where it says something."""
    model, generator = build(MODELS["blip, captions"][0]).text_decoder, torch.Generator().manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    inputs = {**tokens(2, 4), "encoder_hidden_states": torch.randn(2, 9, 32, generator=generator)}
    check(model, {**inputs, "encoder_attention_mask": mask}, {**options, **SCORES})
    assert captures() == 0 and list(reasons()) == ["a mask of the states of an encoder"]
    check(model, {**inputs, "encoder_attention_mask": torch.ones_like(mask)}, {**options, **SCORES})
    assert captures() == 1, (reasons(), fallbacks())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_pictures_in_front_of_tokens(options: dict[str, Any], way: str) -> None:
    """Without any, GIT widens masks by as much; and behind them, padding is a hole in a mask."""
    model, inputs = build(MODELS["git"][0]), tokens(2, 9, 6)
    prompts = {name: value.flip(1) for name, value in inputs.items()}
    check(model, prompts, {**options, **SCORES})
    check(model, {**prompts, "pixel_values": torch.randn(2, 3, 16, 16)}, {**options, **SCORES})
    assert captures() == 0 and accelerated() == 2
    assert list(reasons()) == ["a mask that the model widens by pictures that there are not", "a mask with holes"]


@pytest.mark.parametrize("name", ["roberta and roberta", "speech to text", "vit and trocr, waves"])
def test_nothing_is_drafted_where_positions_are_counted(name: str, way: str) -> None:
    """Behind a padding token in the middle of a pass, the model would count others than step by step."""
    make, inputs = MODELS[name]
    with settings.changed(self_speculation="int8"):
        check(build(make), inputs(), {"max_new_tokens": 24})
    assert captures() == 1 and list(fastgen.stats()[counters.DRAFTS]["not used"]) == [
        "positions that the model counts from what it has stored and the tokens of a pass"
    ]
