"""Models that take more than text: the same tokens, with and without pictures, and captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import releases
from fastgen.optimizer.transformers import prefill
from tests.equivalence import multimodal
from tests.equivalence.captured import captures, reasons
from tests.equivalence.cases import DECODING, draws_others
from tests.equivalence.check import accelerated, check, fallbacks, run
from tests.equivalence.models import BY_NAME, VOCABULARY, Weights, enliven
from tests.equivalence.multimodal import CONFIGS, LENGTH, PICTURES, build, llava, made, text
from tests.equivalence.test_failures import break_

pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.sampled(
        6, each=(("way", "name"), ("way", "decoding"), ("way", "options"), "given"), skips=draws_others
    ),
]

SCORES = {"return_dict_in_generate": True, "output_scores": True}
LEFT_ALONE = ("Mllama", "GlmImage")
# They count positions from the cache, whatever they are given.
COUNTING = ("Exaone4_5_", "HyperCLOVAXVisionV2")
WITH_STATES = ("Qwen3_5", "Lfm2Vl")
CAPTURED = [name for name in CONFIGS if name not in LEFT_ALONE]
# Later releases read pictures once, in front of the prefill, and say what is read there alone. Others have hooks alone.
READS_ONCE = releases.ENCODED in releases.read_in_prefill()
needs_pictures = pytest.mark.skipif(not READS_ONCE, reason="this release reads pictures in the model's first step")


def _all_of(options: dict[str, Any], name: str, way: str) -> dict[str, Any]:
    """Options with all that a call returns; on a GPU, a cache with states is behind what the library would return."""
    return options if way == "graphs" and name in WITH_STATES else {**options, **SCORES}


def _assert_captured(calls: int) -> None:
    assert captures() == calls, (reasons(), fallbacks())


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", CAPTURED)
def test_text(name: str, decoding: str, way: str) -> None:
    """Twice, so that a step that is kept serves a call of other lengths, too."""
    model, options = build(name), _all_of(DECODING[decoding], name, way)
    for length in (LENGTH, LENGTH - 6):
        check(model, {key: value[:, -length:] for key, value in text(3).items()}, options)
    _assert_captured(2)


@pytest.mark.sampled(16, each=(("way", "name"), ("counts", "decoding")), skips=draws_others)
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in PICTURES if name in CAPTURED])
def test_pictures(name: str, counts: tuple[int, ...], decoding: str, way: str) -> None:
    options = DECODING[decoding]
    check(build(name), PICTURES[name](counts), _all_of(options, name, way))
    if not READS_ONCE:
        return
    several = max(options.get("num_beams", 1), options.get("num_return_sequences", 1)) > 1
    if several and max(counts) > 1 and "input_features" in PICTURES[name]():
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


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"eos_token_id": list(range(2, 60))}], ids=str)
@pytest.mark.parametrize("name", COUNTING)
def test_positions_that_the_model_does_not_read(name: str, options: dict[str, Any]) -> None:
    """It counts them from the cache, with the padding: a step serves prompts of one length."""
    for length in (LENGTH, LENGTH - 6):
        check(build(name), {key: value[:, -length:] for key, value in text(3).items()}, options)
    _assert_captured(2)


def test_left_to_the_original() -> None:
    check(build("Mllama"), text(), SCORES)
    assert list(fallbacks()) == ["K and V of pictures in the cache of the text"]


@needs_pictures
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_a_model_that_keeps_the_positions_of_all_steps(options: dict[str, Any]) -> None:
    """From its prefill, a row for each sequence; and of the grids, the library gives each sequence one twice."""
    grids = {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 2]] * 2), "images_per_sample": torch.tensor([2, 2])}
    model = build("GlmImage")
    for inputs in ({**text(), **grids}, text()):
        check(model, inputs, {**options, "max_new_tokens": 8})
    assert list(fallbacks()) == ["positions of steps that the model keeps from its prefill"]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_a_model_inside_of_another(options: dict[str, Any]) -> None:
    """GPT-Neo counts its keys, of which a captured step has more; nobody knows what it does without padding."""
    inside = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8, "num_heads": 4}
    model = made("Llava", llava({"model_type": "gpt_neo", "hidden_size": 32, "intermediate_size": 64, **inside}))
    inputs = text(6)
    for row, padding in enumerate((20, 18, 0, 0, 9, 22)):
        inputs["attention_mask"][row, :padding] = 0
    check(model, inputs, options)
    check(model, text(2), {**options, **SCORES})
    assert accelerated() == 2 and captures() == 0
    assert list(reasons()) == ["a model that the library does not run with a static cache"]


@needs_pictures
@pytest.mark.parametrize("name", ["Qwen3VL", "InternVL", "Llava"])
def test_pictures_in_embeddings(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """Whose pictures they are is not looked for in embeddings."""
    model, inputs = build(name), PICTURES[name]((2, 1))
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    check(model, inputs, {"num_beams": 3})
    assert not [each for each in recwarn if "FastGen" in str(each.message)]
    assert list(fallbacks()) == ["pictures that are not those of each sequence of an input"]


@needs_pictures
def test_what_the_user_has_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library repeats it in place, once: also where the call is done again."""
    model, inputs = build("Llava"), PICTURES["Llava"]((2, 1))
    encoded = model.get_image_features(inputs.pop("pixel_values"), return_dict=True)
    pictures = encoded.pooler_output

    def generate() -> tuple[Any, int]:
        encoded.pooler_output = pictures
        found = model.generate(**inputs, mm_encoder_outputs={"image": encoded}, num_beams=2)
        return found, len(encoded.pooler_output)

    with fastgen.disabled(), torch.no_grad():
        expected, count = generate()
    break_(monkeypatch, prefill, "prefill_in_groups", 1)
    with pytest.warns(RuntimeWarning, match="planted"):
        found, again = generate()
    assert torch.equal(found, expected) and again == count


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
def test_embeddings_in_place_of_tokens(name: str, options: dict[str, Any], given: str) -> None:
    """Learned prompts are such, and what code of others makes of pictures. The first ones are the longest."""
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
