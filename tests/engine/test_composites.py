"""Models made of two, and models that read images, pages or sounds: their requests share steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.git.modeling_git import GitModel

import fastgen
from fastgen import releases
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.planning import ExceedsBudget
from tests.engine.conftest import alone, run
from tests.equivalence import composites, multimodal
from tests.equivalence.others import OTHERS
from tests.equivalence.test_composites import MAKES_MASKS

Inputs = dict[str, torch.Tensor]

ENCODED_ONCE = releases.ENCODED in releases.read_in_prefill()
WIDENS_ROWS = "ndim == 2" in inspect.getsource(GitModel.forward)
ROWS = 16
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "drafts": {"prompt_lookup_num_tokens": 4}, "sampled": {"do_sample": True}, "beams": {"num_beams": 4},
}  # fmt: skip
# The most tokens of each request.
COUNTS = (12, 8, 15, 5, 9, 11)
# What has a row of positions for each input; the first of them that is there counts them.
COUNTED = ("input_ids", "attention_mask", "flattened_patches")
SEEN = {"pixel_values", "input_values", "input_features"}
# Switch Transformers and VideoLLaMA 3 have not been tried. Pegasus-X counts positions in place, which rows share.
# Kosmos-2 and 2.5 count padding among the positions of their steps.
# The `generate` of Granite Speech switches its adapters.
_KOSMOS = {f"kosmos {release}{more}" for release in ("2", "2.5") for more in ("", ", an image")}
APART = {"switch", "pegasus-x", "GraniteSpeech", "GraniteSpeechPlus", "VideoLlama3", *_KOSMOS}
ENCODER_DECODERS = {each.name: each for each in OTHERS if each.encoder_decoder}


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Inputs]]] = {
    **{name: (partial(composites.build, make), inputs) for name, (make, inputs) in composites.MODELS.items()},
    **{
        name: (partial(multimodal.build, name), partial(made, (1,)))
        for name, made in multimodal.PICTURES.items()
        if name in multimodal.CONFIGS  # those of this release
    },
    **{name: (family.build, family.make_inputs) for name, family in ENCODER_DECODERS.items()},
}


def is_captured(name: str) -> bool:
    """Whether steps are, in this release: earlier ones read pictures at each step, and make masks otherwise."""
    makes_masks = MAKES_MASKS if name.startswith("blip,") else WIDENS_ROWS or not name.startswith("git")
    return makes_masks and (ENCODED_ONCE or name not in {*multimodal.PICTURES, "udop"})


def requests_of(given: Inputs) -> list[Inputs]:
    """Rows of these inputs, of three lengths, with images or sounds of their own."""
    found, counted = list[Inputs](), next((given[name].shape[1] for name in COUNTED if name in given), 0)
    for number in range(len(COUNTS)):
        rows, left = len(next(iter(given.values()))), counted - number % 3 * max(counted // 8, 1)
        # A picture may have many rows, if there is one input.
        one = {name: value[number % rows :: rows].clone() for name, value in given.items()}
        for name in SEEN & one.keys():
            one[name] += torch.randn(one[name].shape, generator=torch.Generator().manual_seed(number))
        found.append({key: value[:, :left] if value.shape[1:2] == (counted,) else value for key, value in one.items()})
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in APART])
def test_requests_share_steps(name: str, way: str) -> None:
    """Each comes with another step, and asks for another number of tokens."""
    build, inputs = CASES[name]
    model, given = build(), requests_of(inputs())
    each = [{**composites.options(name, WAYS[way]), "max_new_tokens": count} for count in COUNTS]
    seed = 3 if way == "sampled" else None
    executor = ContinuousBatches(model, ROWS)
    requests = [make(model, one, None, how, seed, ROWS) for one, how in zip(given, each, strict=True)]
    run(executor, requests)
    stats = executor.stats()
    if is_captured(name):
        assert stats["busy_row_steps"] > stats["steps"] * WAYS[way].get("num_beams", 1), stats
        assert sum(stats["alone"].values()) <= (way == "drafts")  # one request may show that there are none
    found = [request.future.result(0) for request in requests]
    with fastgen.disabled():
        for one, how, result in zip(given, each, found, strict=True):
            torch.manual_seed(3)
            assert torch.equal(alone(model, one, **{**how, "prompt_lookup_num_tokens": None}), result)
    assert len({tuple(each.flatten().tolist()) for each in found}) > 2


@pytest.mark.parametrize("name", ["blip, captions", "git"])
def test_images_of_several_sizes(name: str) -> None:
    """What GIT itself adds to a mask is for images of one size: a request with another has a call of its own."""
    if not is_captured(name):
        pytest.skip("steps of this release's are not captured")
    build, inputs = CASES[name]
    model, given, options = build(), requests_of(inputs()), {"interpolate_pos_encoding": True, "max_new_tokens": 12}
    for number in (1, 4):
        given[number]["pixel_values"] = given[number]["pixel_values"].repeat(1, 1, 2, 2)
    with fastgen.disabled():
        expected = [alone(model, one, **options) for one in given]
    with fastgen.Engine(model) as engine:
        found, stats = engine.generate(given, **options), engine.stats()
    assert all(map(torch.equal, expected, found))
    assert stats["steps"] and sum(stats["alone"].values()) == (2 if name == "git" else 0)


@pytest.mark.parametrize("name", ["git", "blip, captions", "blip 2 with opt", "udop"])
def test_what_images_take_counts_for_the_budget(name: str) -> None:
    """Some of the requests are preempted, and begin again. One that may need more than there is fails."""
    if not is_captured(name):
        pytest.skip("steps of this release's are not captured")
    build, inputs = CASES[name]
    model, given, peaks, options = build(), requests_of(inputs()), [0], {"max_new_tokens": 40, "min_new_tokens": 40}
    for budget in (None, 2 / 3, 1 / 30):
        executor = ContinuousBatches(model, ROWS, cache_bytes=budget and int(peaks[-1] * budget))
        requests = [make(model, one, None, options, None, ROWS) for one in copy.deepcopy(given)]
        run(executor, requests, at_once=4)
        peaks.append(executor.stats()["kv_bytes"] or peaks[-1])
        if budget == 2 / 3:
            assert executor.counts["preempted"] and not executor.alone and peaks[-1] <= peaks[-2] * budget
            with fastgen.disabled():
                expected = [alone(model, one, **options) for one in given]
            assert all(torch.equal(each.future.result(0), one) for each, one in zip(requests, expected, strict=True))
    assert all(isinstance(request.future.exception(0), ExceedsBudget) for request in requests)
