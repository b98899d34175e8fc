"""Models made of two: images, sounds or text in, text out."""

from __future__ import annotations

import pytest

from tests.equivalence.captured import captures, reasons
from tests.equivalence.cases import DECODING
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.composites import MODELS, bert_and_rembert, build, idefics, of_idefics, options, tokens
from tests.equivalence.models import LONG

SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.sampled(2, each=("name",))
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", MODELS)
def test_models_made_of_two(name: str, decoding: str) -> None:
    make, inputs = MODELS[name]
    check(build(make), inputs(), {**options(name, DECODING[decoding]), **SCORES})
    assert accelerated() == 1


@pytest.mark.sampled(2, each=("name", "way"))
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", MODELS)
def test_their_steps_are_captured(name: str, decoding: str, way: str) -> None:
    """Twice, so that a step that is kept serves a call of fewer inputs, too."""
    if way == "graphs" and DECODING[decoding].get("do_sample"):
        pytest.skip("other samples are drawn there")
    (make, inputs), given = MODELS[name], {**options(name, DECODING[decoding]), **SCORES}
    check(build(make), inputs(), given)
    check(build(make), {key: value[1:] for key, value in inputs().items()}, given)
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
