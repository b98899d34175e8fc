"""Models that take more than text: the same tokens, with and without pictures, and captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import releases
from tests.equivalence import multimodal
from tests.equivalence.captured import captures, reasons
from tests.equivalence.cases import DECODING
from tests.equivalence.check import accelerated, check, fallbacks, run
from tests.equivalence.models import BY_NAME, VOCABULARY, Weights, enliven
from tests.equivalence.multimodal import CONFIGS, LENGTH, PICTURES, build, text

pytestmark = pytest.mark.usefixtures("way")

SCORES = {"return_dict_in_generate": True, "output_scores": True}
# Their steps are not captured: the library does not run them with a static cache, and hands on what it may not.
HOOKS_ALONE = ("PaliGemma",)
LEFT_ALONE = ("Mllama",)
WITH_STATES = ("Qwen3_5", "Lfm2Vl")
CAPTURED = [name for name in CONFIGS if name not in (*HOOKS_ALONE, *LEFT_ALONE)]
# Later releases read pictures once, in front of the prefill, and say what is read there alone. Others have hooks alone.
READS_ONCE = releases.ENCODED in releases.read_in_prefill()


def _all_of(options: dict[str, Any], name: str, way: str) -> dict[str, Any]:
    """Options with all that a call returns; on a GPU, a cache with states is behind what the library would return."""
    return options if way == "graphs" and name in WITH_STATES else {**options, **SCORES}


def _needs_same_draws(way: str, options: dict[str, Any]) -> None:
    if way == "graphs" and options.get("do_sample"):
        pytest.skip("other samples are drawn there")


def _assert_captured(calls: int) -> None:
    assert captures() == calls, (reasons(), fallbacks())


@pytest.mark.sampled(3, each=("name", "decoding"))
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", CAPTURED)
def test_text(name: str, decoding: str, way: str) -> None:
    """Twice, so that a step that is kept serves a call of other lengths, too."""
    model, options = build(name), _all_of(DECODING[decoding], name, way)
    _needs_same_draws(way, options)
    for length in (LENGTH, LENGTH - 6):
        check(model, {key: value[:, -length:] for key, value in text(3).items()}, options)
    _assert_captured(2)


@pytest.mark.sampled(4, each=("name", "counts"))
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in PICTURES if name in CAPTURED])
def test_pictures(name: str, counts: tuple[int, ...], decoding: str, way: str) -> None:
    options = DECODING[decoding]
    _needs_same_draws(way, options)
    check(build(name), PICTURES[name](counts), _all_of(options, name, way))
    if not READS_ONCE:
        return
    several = max(options.get("num_beams", 1), options.get("num_return_sequences", 1)) > 1
    if several and name == "Voxtral":
        assert list(fallbacks()) == ["pictures that the library repeats one by one"]
    elif several and name == "Glm4v" and max(counts) > 1:  # its own method repeats them one by one
        assert list(fallbacks()) == ["pictures that are not those of each sequence of an input"]
    else:
        _assert_captured(1)


def test_a_step_serves_calls_with_other_pictures_and_without() -> None:
    """What the prefill has noted in the model, and the axes of positions, are those of the call."""
    model = build("Qwen3VL")
    for counts in ((1, 1), (2, 2), (1, 2)):
        check(model, PICTURES["Qwen3VL"](counts), {})
    check(model, text(), {})
    _assert_captured(4 if READS_ONCE else 1)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3VL", "Llava"])
def test_a_picture_in_a_chat(name: str) -> None:
    """The second turn has the cache of the first one, and no picture."""
    model, more = build(name), torch.randint(4, VOCABULARY - 5, (1, 6), generator=torch.Generator().manual_seed(5))

    def turns() -> list[Any]:
        first = {key: value[: len(value) // 2] for key, value in PICTURES[name]((1, 1)).items()}
        made = run(model, first, {"return_dict_in_generate": True})
        ids = torch.cat([made.sequences, more], dim=1)
        types = {key: (ids == multimodal.PLACEHOLDER).long() for key in first if "token_type_ids" in key}
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}
        # Not among the inputs, which are copied: the cache is handed on.
        return [made.sequences, run(model, second, releases.with_cache(releases.cache_in(made)))]

    with fastgen.disabled():
        expected = turns()
    assert all(map(torch.equal, expected, turns()))
    assert captures() == 2 or not READS_ONCE, (reasons(), fallbacks())


@pytest.mark.parametrize("name", HOOKS_ALONE)
def test_without_captured_steps(name: str) -> None:
    check(build(name), text(), SCORES)
    assert accelerated() == 1 and captures() == 0
    check(build(name), text(), {"num_beams": 3, **SCORES})


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_to_the_original(name: str) -> None:
    check(build(name), text(), SCORES)
    assert list(fallbacks()) == ["K and V of pictures in the cache of the text"]


def test_assistants_are_the_librarys() -> None:
    """It gives them inputs of the model, and says where they do not take these."""
    model, assistant = build("Llava"), BY_NAME["llama"].build()
    inputs = {"input_ids": text()["input_ids"][:1]}
    check(model, inputs, {"assistant_model": assistant})
    assert list(fallbacks()) == ["assisted decoding"]


@pytest.mark.parametrize("name", ["Gemma4", "Qwen2VL", "SmolVLM"])
def test_weights_that_change(name: str) -> None:
    """Between two calls with one step."""
    model = build(name)
    check(model, text(), {})
    try:
        with torch.no_grad():
            enliven(model, Weights(2))
        check(model, text(), {})
    finally:
        build.cache_clear()
    _assert_captured(2)


@pytest.mark.parametrize("given", ["embeddings", "masked", "last tokens, too"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt", "qwen3"])
@pytest.mark.sampled(3, each=("name", "options", "given"))
def test_embeddings_in_place_of_tokens(name: str, options: dict[str, Any], given: str, way: str) -> None:
    """Learned prompts are such, and what code of others makes of pictures. The first ones are the longest."""
    _needs_same_draws(way, options)
    family = BY_NAME[name]
    model = family.build()
    for length in (150, 44):
        inputs = family.make_inputs(3, length=length)
        made: dict[str, Any] = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
        if given != "embeddings":
            made["attention_mask"] = inputs["attention_mask"]
        if given == "last tokens, too":
            made["input_ids"] = inputs["input_ids"][:, -5:]
        check(model, made, {**options, **SCORES, "max_new_tokens": 24})
    _assert_captured(2)
