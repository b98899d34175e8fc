"""Decode steps captured in a graph (simulated on the CPU): the same results."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CompileConfig, StoppingCriteriaList
from transformers.generation import utils

import fastgen
from fastgen import releases
from fastgen.decoding import layer_forms
from fastgen.decoding.captured import graph
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers import cache as caches
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.captured import graph_cache, key
from tests import near_ties
from tests.equivalence.captured import (
    BEAMS,
    BY_RELEASE,
    FAMILIES,
    GREEDY,
    KNOWN,
    CalledGraph,
    Graph,
    build,
    captures,
    every,
    reasons,
    to,
)
from tests.equivalence.check import check, run
from tests.equivalence.models import BY_NAME, EOS, Family
from tests.equivalence.others import LATER
from tests.models import tiny_unilm

pytestmark = pytest.mark.sampled(6)

OPTIONS = {
    "greedy": GREEDY,
    "greedy with processors": {**GREEDY, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_new_tokens": 9},
    "beams": BEAMS,
    "beams, all returned": {**BEAMS, "num_return_sequences": 3},
    "beams with processors": {**BEAMS, "no_repeat_ngram_size": 3, "min_new_tokens": 12, "bad_words_ids": [[7], [9]]},
    "until the first": {**BEAMS, "early_stopping": True, "length_penalty": 2.0},
    "never early": {**BEAMS, "early_stopping": "never", "length_penalty": 0.6},
    "no end": {**BEAMS, "eos_token_id": None},
    "two ends": {**BEAMS, "eos_token_id": [EOS, 11], "length_penalty": -1.0},
    "forced end": {**BEAMS, "forced_eos_token_id": EOS},
    # The library tests whether `early_stopping` is True itself: nothing else that is equal to it stops early.
    **{f"early_stopping={stops!r}": {**BEAMS, "early_stopping": stops} for stops in (1, 0, np.True_)},
    "processor of the host": {**BEAMS, "exponential_decay_length_penalty": (6, 1.2), "epsilon_cutoff": 0.0},
}
# The model does not see the options of the search: one model with an encoder and one without have all of them.
TRIED = [(FAMILIES[place], name) for place in (0, 3) for name in OPTIONS]
TRIED += [(FAMILIES[place], name) for place in (1, 2) for name in ("greedy", "beams with processors")]


@pytest.mark.parametrize(("family", "name"), TRIED, ids=str)
def test_same_tokens(family: Family, name: str, device: torch.device, replays: list[None]) -> None:
    """With a graph that is captured, and with one that is kept."""
    model, inputs, options = *build(family, device), OPTIONS[name]
    check(model, inputs, options)
    assert captures() == 1, reasons()
    made = Graph.made
    check(model, inputs, options)
    assert captures() == 2 and Graph.made == made
    assert replays


@every
def test_calls_of_one_shape_share_a_step(family: Family, device: torch.device) -> None:
    """Whatever an earlier call has left in the buffers: fewer inputs, shorter ones, other limits."""
    model, inputs = build(family, device)
    run(model, inputs, BEAMS)
    made = Graph.made
    for count, width, options in ((1, 3, {}), (3, 5, {"max_new_tokens": 40}), (3, 2, {"length_penalty": 0.0})):
        part = slice(width) if family.encoder_decoder else slice(-width, None)  # where nothing is padded
        less = {name: value[:count, part] for name, value in inputs.items()}
        check(model, less, {**BEAMS, **options})
    batches = {inputs["input_ids"].shape[0], 1}
    assert captures() == 4
    assert device.type == "cuda" or Graph.made - made <= len(batches) * 2


# What is accelerated without a captured step, and what the original code runs.
NOT_CAPTURED = {"nllb-moe"}
NOT_ACCELERATED = {"xlnet", "openai-gpt", "llama4", "doge", "rwkv", "recurrent-gemma"}
# One for each way in which a model makes positions, masks and K/V. test_programs.py records all models.
SOME = ("t5", "llama", "prophetnet", "bloom", "gemma2", "opt", "gptj", "gpt-oss", "deepseek-v3", "gpt-bigcode",
        "m2m100", "led", "fsmt", "falcon", "falcon-alibi", "ctrl", "gpt-neo", "mpt",
        *(family.name for family in LATER))  # fmt: skip


@pytest.mark.parametrize("name", [name for name in KNOWN if name in {*SOME, *NOT_CAPTURED}])
def test_models(name: str, device: torch.device) -> None:
    model, inputs = build(KNOWN[name], device)
    check(model, inputs, {**BEAMS, "min_new_tokens": 12})
    assert captures() + sum(reasons().values()) == 1
    assert name in BY_RELEASE or captures() == (name not in NOT_CAPTURED), reasons()


@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "gpt2"])
@pytest.mark.parametrize("options", [GREEDY, {**BEAMS, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_labels_are_not_read(name: str, options: dict[str, Any], device: torch.device, replays: list[None]) -> None:
    """`Seq2SeqTrainer` passes them on, and the library ignores them."""
    model, inputs = build(BY_NAME[name], device)
    for length in (5, 70):
        labels = torch.full((len(next(iter(inputs.values()))), length), EOS, device=device)
        check(model, inputs | {"labels": labels}, options)
    assert replays and captures() == 2, reasons()


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_mask_of_frames(options: dict[str, Any], device: torch.device) -> None:
    """Whisper counts the frames of a recording by its mask, and attends to all: its steps are those without a mask."""
    model, inputs = build(BY_NAME["whisper"], device)
    mask = torch.ones_like(inputs["input_features"][:, 0], dtype=torch.long)
    mask[0, -6:] = 0
    check(model, {**inputs, "attention_mask": mask}, options)
    made = Graph.made
    check(model, inputs, options)
    assert captures() == 2 and Graph.made == made, reasons()
    # The library passes the masks of all recordings with the windows that are left of a batch.
    check(model, {"input_features": inputs["input_features"][:1], "attention_mask": mask}, options)
    assert captures() == 3, reasons()


def test_a_table_that_may_be_too_short(device: torch.device) -> None:
    """Some step would make it anew, which is not captured."""
    model, inputs = build(BY_NAME["m2m100"], device)
    inputs = {name: value[:, :9] for name, value in inputs.items()}
    for part in (model.model.encoder, model.model.decoder):
        part.embed_positions.make_weights(16, model.config.d_model, model.config.pad_token_id)
    check(model, inputs, {**BEAMS, "min_new_tokens": 20})
    (reason,) = reasons()
    assert ("not permitted" if device.type == "cuda" else "waits for the device") in reason and captures() == 0


@pytest.mark.parametrize("has_prompt", [False, True], ids=["beams", "a prompt"])
def test_prophetnet(has_prompt: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams with a column of their own, and buckets of distances in buffers that are not full."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 16)
    model, inputs = build(BY_NAME["prophetnet"], device)
    options = {**BEAMS, "max_new_tokens": 36, "min_new_tokens": 30}  # more than the distance of the last bucket
    if has_prompt:
        inputs["decoder_input_ids"] = torch.tensor([[1, 20, 21], [1, 30, 31], [1, 40, 41]], device=device)
    else:
        options["no_repeat_ngram_size"] = 3
    for _ in range(2):
        check(model, inputs, options)
    assert captures() == 2, reasons()


@pytest.mark.parametrize("given", ["left", "right", "a target"])
def test_unilm(given: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step stores two positions and drops one, after a source that self-attention has stored."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 8)
    has_target = given == "a target"
    model = tiny_unilm.tiny_model(end=3.0, attn_implementation="eager" if has_target else "sdpa").to(device)
    inputs = tiny_unilm.batch(tiny_unilm.sources(44, 12, 37), "right" if given == "right" else "left")
    options: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 12}
    if given != "left":
        options |= {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 3}
    if has_target:
        inputs["decoder_input_ids"] = torch.tensor([[tiny_unilm.PAD, start, start + 1] for start in (20, 30, 40)])
    for _ in range(2):
        check(model, to(device, inputs), options)
    assert captures() == 2, reasons()


def test_unilm_up_to_its_last_position(device: torch.device) -> None:
    """With one more, the model raises if the search gets there."""
    model = tiny_unilm.tiny_model(end=-100.0, max_position_embeddings=60).to(device)
    inputs = to(device, tiny_unilm.batch(tiny_unilm.sources(44, 30)))
    check(model, inputs, {"num_beams": 2, "max_new_tokens": 16})
    assert captures() == 1, reasons()
    with pytest.raises(ValueError, match="but the model has 60"):
        run(model, inputs, {"num_beams": 2, "max_new_tokens": 17})
    assert reasons() == {"more positions than the model has": 1}


@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("beams", [1, 3])
def test_tensors_are_of_the_mode_of_the_call(beams: int, name: str, device: torch.device) -> None:
    """Those returned, and the scores of a criterion: in inference mode, only code in that mode may write to them."""
    model, inputs = build(BY_NAME[name], device)
    options = {"num_beams": beams, "max_new_tokens": 24, "eos_token_id": None}
    returned = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}

    def modes() -> tuple[list[tuple[str, bool]], set[bool]]:
        seen = set[bool]()

        def criterion(tokens: torch.Tensor, scores: tuple[torch.Tensor, ...], **others: Any) -> torch.Tensor:
            seen.add(scores[-1].is_inference())
            return torch.zeros(len(tokens), dtype=torch.bool, device=device)

        watched = {**options, **returned, "stopping_criteria": StoppingCriteriaList([criterion])}
        results = [model.generate(**inputs, **given) for given in (options, {**options, **returned}, watched)]
        results[1:] = map(dict, results[1:])
        for result in results[1:]:
            layers = (layer for part in caches.layers_in(result.pop(releases.cache_name())) for layer in part)
            result["kept"] = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        found = near_ties.pairs(results, results)
        return [(place, each.is_inference()) for place, each, _ in found if isinstance(each, torch.Tensor)], seen

    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            found, seen = modes()
            with fastgen.disabled():
                assert (found, seen) == modes()
        assert seen == {dict(found)["result[0]"]} == {mode is torch.inference_mode}
    assert captures() == 6, reasons()


RETURNED = ["bart", "t5", "gpt2", "llama", "prophetnet", "mistral-short-window"]


@pytest.mark.parametrize("name", [*RETURNED, "unilm"])
def test_what_is_returned_besides_the_tokens(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is as the library leaves it, also if the step was exchanged, or steps ran past the end."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 8)
    if name == "unilm":
        model = tiny_unilm.tiny_model(end=3.0).to(device)
        inputs = to(device, tiny_unilm.batch(tiny_unilm.sources(44, 12, 37)))
    else:
        model, inputs = build(BY_NAME[name], device)
    calls = [
        {**BEAMS, "min_new_tokens": 10, "num_return_sequences": 2},
        {**BEAMS, "eos_token_id": list(range(11, 31)), "min_new_tokens": 6, "early_stopping": True, "num_beams": 4},
        {**BEAMS, "eos_token_id": None},
    ]
    if name != "mistral-short-window":  # with one sequence, the library reads no more than the window
        calls.append({**GREEDY, "min_new_tokens": 10})
    for options in calls:
        found = check(model, inputs, {**options, "return_dict_in_generate": True})
        assert releases.cache_in(found).get_seq_length() > 0
    assert captures() == len(calls), reasons()


@every
def test_capacity_grows(family: Family, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_FIRST_NEW", 8)
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 8)
    model, inputs = build(family, device)
    options = {**BEAMS, "min_new_tokens": 30, "max_new_tokens": 30}
    for _ in range(2):
        check(model, inputs, options)
    assert captures() == 2, reasons()
    assert sorted(key.sizes.new for key in graph_cache._of(model).steps) == [8, 16, 32]


@pytest.mark.usefixtures("tests_are_the_librarys")
@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["rows", "beams"])
def test_experts_are_those_for_steps(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the library's implementation for the prefill waits for the device. That for steps does not."""
    model, inputs = build(KNOWN["mixtral"], device)
    active, seen = [False], set()
    forward, library = type(model).forward, type(model)._optimize_model_for_decode

    @contextlib.contextmanager
    def optimize(self: Any) -> Any:
        active.append(True)
        with library(self):
            yield
        active.pop()

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.add(active[-1])
        return forward(self, *args, **kwargs)

    functools.update_wrapper(watching, forward)
    monkeypatch.setattr(type(model), "_optimize_model_for_decode", optimize)
    monkeypatch.setattr(type(model), "forward", watching)
    run(model, inputs, {**options, "min_new_tokens": 12})
    assert captures() == 1, reasons()
    assert seen == {False, True}


def test_with_the_kernels(device: torch.device, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, interpreted without a GPU. A simulated graph does not see them, so steps are called there."""
    names = ["bart", "t5", "gpt2", "llama"]
    if device.type != "cuda":
        monkeypatch.setattr(graph, "Graph", CalledGraph)
        monkeypatch.setattr(operators, "is_interpreted", lambda: True)
        monkeypatch.setattr(loop, "MIN_STEPS", 1)
        names = ["t5"]
    normalised: list[str] = []
    normalise = layer_forms.normalise
    monkeypatch.setattr(layer_forms, "normalise", lambda x, *layer: normalised.append(name) or normalise(x, *layer))
    for name in names:
        model, _ = build(BY_NAME[name], device)
        few = to(device, BY_NAME[name].make_inputs(1, 3))  # the interpreter is slow
        check(model, few, {**BEAMS, "num_beams": 2, "max_new_tokens": 3})
    assert captures() == len(names), reasons()
    assert set(normalised) == {"t5", "llama"} & set(names)


def test_samples_have_the_distribution(device: torch.device) -> None:
    """Each token is drawn as often as its probability says, given the tokens before it."""
    model, inputs = build(BY_NAME["gpt2"], device)
    one = {name: value[:1] for name, value in inputs.items()}
    count = 600
    options = {"do_sample": True, "top_k": 4, "max_new_tokens": 10, "min_new_tokens": 10, "num_return_sequences": count}
    torch.manual_seed(0)
    found = model.generate(**one, **options)
    assert captures() == 1, reasons()
    width = one["input_ids"].shape[1]
    # The fourth token is drawn in a replay. It is compared with the sum of the probabilities of all histories.
    with torch.no_grad():
        logits = model(found[:, : width + 3]).logits[:, -1]
    logits[:, EOS] = -float("inf")
    best = logits.topk(4, dim=1)
    expected = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(dim=1)).sum(dim=0)
    drawn = torch.bincount(found[:, width + 3], minlength=logits.shape[1])
    assert (drawn[expected == 0] == 0).all()
    deviation = (drawn - expected).abs() / expected.clamp(min=1).sqrt()
    assert deviation.max() < 4.5


@pytest.mark.parametrize("beams", [1, 3])
def test_samples_follow_the_seed(beams: int, device: torch.device) -> None:
    model, inputs = build(BY_NAME["llama"], device)
    options = {"do_sample": True, "num_beams": beams, "max_new_tokens": 16, "min_new_tokens": 16}
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        results.append(model.generate(**inputs, **options).tolist())
    assert results[0] == results[2] != results[1]
    assert captures() == 3


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "whisper"])
def test_attention_of_the_models_own(name: str, device: torch.device) -> None:
    """Spelled out as matrix products, without a mask of the encoder's output: unused places are left out."""
    family = BY_NAME[name]
    model = copy.deepcopy(family.build("eager")).to(device)
    inputs = {key: value.to(device) for key, value in family.make_inputs(length=7, padding=None).items()}
    inputs.pop("attention_mask" if family.encoder_decoder else "", None)
    for _ in range(2):
        check(model, inputs, BEAMS)
    assert captures() == 2, reasons()


@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "do_sample": True}, BEAMS], ids=["greedy", "sample", "beams"])
def test_a_compiler_that_is_asked_for(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's loops warn that they compile nothing, except beam search, which never compiles."""
    said = list[str]()
    monkeypatch.setattr(utils.logger, "warning_once", said.append)
    model, inputs = build(BY_NAME["llama"], device)
    with fastgen.disabled():
        run(model, inputs, {**options, "compile_config": CompileConfig()})
    expected = said.copy()
    said.clear()
    run(model, inputs, {**options, "compile_config": CompileConfig()})
    assert captures() == 1, reasons()
    assert said == expected and len(said) == (options is not BEAMS)
