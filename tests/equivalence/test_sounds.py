"""Models that make sounds: a `generate` of their own calls the library's loop, with several rows for an input."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fastgen
from fastgen import counters, settings
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.optimizer.transformers.captured import key
from tests.equivalence.captured import Counting, captures, reasons
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.sounds import CODEBOOKS, CODES, MODELS, ONE_CODEBOOK, build, calls, inputs, ways
from tests.equivalence.test_failures import break_
from tests.equivalence.user_code import Listens

RELEASE = Version(transformers.__version__)
# Before 5.24, Melody's prefill stores other positions than its tokens, and its calls have hooks alone.
MELODY = ["musicgen melody"] if Version("5.24") <= RELEASE else []
CAPTURED = ["musicgen", "musicgen, stereo", *MELODY, "bark"]
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture
def without_captured_steps() -> Any:
    with settings.changed(captured_step="never"):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_that_the_models_own_generate_begins(name: str, without_captured_steps: None) -> None:
    returned = {} if name == "bark" else SCORES  # its parts hand on tokens
    given = [{**options, **returned} for options in ways(name)] + ([ways(name)[-1]] if returned else [])
    for options in given:
        check(build(MODELS[name]), inputs(name), options)
    assert accelerated() == calls(name) * len(given) and not fallbacks()


@pytest.mark.parametrize("name", CAPTURED)
def test_steps_are_captured(name: str, way: str) -> None:
    """Twice, so that a step that is kept serves a call of fewer inputs, too."""
    model = build(MODELS[name])
    for options in ways(name):
        if way == "graphs" and options["do_sample"]:
            continue  # other samples are drawn there
        fastgen.reset_stats()
        check(model, inputs(name), options)
        check(model, {key: value[1:] for key, value in inputs(name).items()}, options)
        assert captures() >= 2, (reasons(), fallbacks())


@pytest.mark.parametrize("name", ["musicgen", *MELODY])
@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 2.0}], ids=["alone", "guided"])
def test_what_captured_steps_of_codebooks_return(name: str, guidance: dict[str, Any], way: str) -> None:
    """Scores and logits, of which guidance makes one of two; K and V of both; and tokens behind a prompt of sounds."""
    model, given = build(MODELS[name]), inputs(name)
    options = {"do_sample": False, **guidance, **SCORES}
    check(model, given, options)
    prompt = torch.randint(0, CODES, (2 * CODEBOOKS, 5), generator=torch.Generator().manual_seed(0))
    prompt[:, 0] = CODES
    check(model, {**given, "decoder_input_ids": prompt}, options)
    check(model, {**given, "decoder_input_ids": prompt[:, :3]}, {**options, "max_new_tokens": 40})
    assert captures() == 3, (reasons(), fallbacks())


def test_a_step_of_codebooks_that_grows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read in place of the last tokens is at the end of the call, and other calls end elsewhere."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 16)
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 16)
    model = build(MODELS["musicgen"])
    for length in (160, 20, 90, 75):
        check(model, inputs("musicgen"), {"do_sample": False, "guidance_scale": 3.0, "max_new_tokens": length})
    assert captures() == 4, (reasons(), fallbacks())


def test_guidance_of_one_codebook(way: str) -> None:
    """Whose rows of tokens are those of its inputs, and half of the model's."""
    for length in (24, 12):
        options = {"do_sample": False, "guidance_scale": 3.0, "max_new_tokens": length, **SCORES}
        check(build(ONE_CODEBOOK), inputs("musicgen"), options)
    assert captures() == 2, (reasons(), fallbacks())


def test_codebooks_are_streamed(way: str) -> None:
    model, streamed = build(MODELS["musicgen"]), []
    for run in (fastgen.disabled, contextlib.nullcontext):
        streamer = Listens()
        with run():
            model.generate(**inputs("musicgen"), do_sample=False, guidance_scale=3.0, streamer=streamer)
        streamed.append(streamer.heard)
    assert streamed[0] == streamed[1] and captures() == 1, (reasons(), fallbacks())


@pytest.mark.parametrize(
    "options, why",
    [
        pytest.param(
            {"repetition_penalty": 1.3, "guidance_scale": 3.0},
            "guidance that does not come first",
            marks=pytest.mark.skipif(Version("5.24") > RELEASE, reason="the library raises for its own padding token"),
        ),
        ({"eos_token_id": 5, "suppress_tokens": [5]}, "codebooks that end for themselves"),
        ({"logits_processor": [Counting()], "guidance_scale": 3.0}, "guidance that does not come first"),
    ],
    ids=["penalty", "end", "processor"],
)
def test_codebooks_whose_steps_are_not_captured(options: dict[str, Any], why: str, way: str) -> None:
    def given() -> dict[str, Any]:
        return {"do_sample": False, **copy.deepcopy(options)}

    check(build(MODELS["musicgen"]), inputs("musicgen"), given)
    assert captures() == 0 and why in next(iter(reasons())), (reasons(), fallbacks())


def test_nothing_is_drafted_for_codebooks(way: str) -> None:
    with settings.changed(self_speculation="int8"):
        check(build(MODELS["musicgen"]), inputs("musicgen"), {"do_sample": False})
    assert captures() == 1, (reasons(), fallbacks())
    assert fastgen.stats()[counters.DRAFTS]["not used"] == {"rows of tokens that are codebooks": 1}


@pytest.mark.skipif(Version("5.17") > RELEASE, reason="the library raises")
def test_the_decoder_of_a_model_generates_alone() -> None:
    """From tokens in place of states, and from a prompt of which the library's steps read the last token."""
    model = copy.deepcopy(build(MODELS["musicgen"]).decoder)
    model.generation_config.update(decoder_start_token_id=64, pad_token_id=64, bos_token_id=64)
    prompt = torch.full((8, 1), 64)
    options = {"max_new_tokens": 12, "num_return_sequences": 1, **SCORES}
    check(model, {"input_ids": prompt}, {**options, "do_sample": True})
    longer = torch.cat([prompt, torch.randint(0, 64, (8, 3), generator=torch.Generator().manual_seed(0))], dim=1)
    check(model, {"input_ids": longer}, {**options, "do_sample": False})
    assert accelerated() == 2, fallbacks()


def test_several_sequences_for_an_input_are_left_to_the_library() -> None:
    """It repeats rows, which are codebooks."""
    check(build(MODELS["musicgen"]), inputs("musicgen"), {"do_sample": True, "num_return_sequences": 3})
    assert accelerated() == 0 and "several sequences for an input" in next(iter(fallbacks()))


def test_a_failure_in_such_a_loop_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    break_(monkeypatch, GrowingKV, "extend", 1)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(build(MODELS["musicgen"]), inputs("musicgen"), {"do_sample": True, "guidance_scale": 3.0})
