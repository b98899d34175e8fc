"""Calls left to the original code: the same result, the right reason, and no error that the original does not raise."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaForCausalLM

import fastgen
from fastgen import releases
from tests.equivalence.cases import BEAM, DECODING, SAMPLE
from tests.equivalence.check import accelerated, assert_same, cache_with, check, fallbacks, run
from tests.equivalence.models import BY_NAME, EOS, VOCABULARY
from tests.equivalence.others import LATER, OTHERS

LLAMA, MISTRAL = BY_NAME["llama"], BY_NAME["mistral-short-window"]
ONE_LAYER = dataclasses.replace(LLAMA, config=LLAMA.config | {"num_hidden_layers": 1})  # to compile
OTHERS_BY_NAME = {family.name: family for family in OTHERS}
SCORES = {"return_dict_in_generate": True, "output_scores": True}
# Models whose state cannot be expanded.
WITHOUT_BEAMS = {"rwkv"}


# ---- models of all kinds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("decoding", ["beam", "sampling, 4 returned"], ids=["beam", "sample"])
@pytest.mark.parametrize("family", [*OTHERS, *LATER], ids=str)
def test_other_models(family: Any, decoding: str) -> None:
    """The result is the same, accelerated or not, and no accelerated call fails."""
    if family.name in WITHOUT_BEAMS:
        decoding = "sampling"
    check(family.build(), family.make_inputs(), {**DECODING[decoding], **SCORES})
    assert accelerated() + sum(fallbacks().values()) == 1
    assert not [reason for reason in fallbacks() if "in the accelerated call" in reason]


# ---- reasons


def _own(method: str, name: str) -> Callable[[], Any]:
    """The Llama of the grid, in a subclass with a method of its own that does what the library's does."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "_reorder_cache":
            args[0].reorder_cache(args[1])
            return args[0]
        return getattr(LlamaForCausalLM, method)(self, *args, **kwargs)

    def build() -> Any:
        original = LLAMA.build()
        model = type(name, (LlamaForCausalLM,), {method: called, "__module__": __name__})(original.config).eval()
        model.load_state_dict(original.state_dict())
        model.generation_config = original.generation_config
        return model

    return build


def _changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    """A copy of the Llama of the grid with something changed."""

    def build() -> Any:
        model = copy.deepcopy(LLAMA.build())
        change(model)
        return model

    return build


def _replace_forward(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _prefilled(family: Any, rows: int) -> DynamicCache:
    """A cache of the first positions of the prompt, with rows that differ between the sequences of an input."""
    ids = family.make_inputs(padding=None)["input_ids"][:, :6].repeat_interleave(rows, 0)
    return cache_with(family.build(), (ids + torch.arange(len(ids)).unsqueeze(1)) % VOCABULARY)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that falls back: a part of the reason that is counted, and what makes the model, options and inputs."""

    reason: str
    build: Callable[[], Any] = LLAMA.build
    options: Callable[[], dict[str, Any]] = lambda: BEAM
    inputs: Callable[[], dict[str, Any]] = LLAMA.make_inputs


def _single() -> dict[str, Any]:
    return LLAMA.make_inputs(batch=1)


CASES = {
    "assistant model, sampled": Case(
        "assisted decoding",
        options=lambda: {"assistant_model": BY_NAME["qwen2"].build(), "do_sample": True},
        inputs=_single,
    ),
    "prompt lookup, sampled": Case(
        "assisted decoding", options=lambda: {"prompt_lookup_num_tokens": 3, "do_sample": True}, inputs=_single
    ),
    "custom loop": Case(
        "a custom decoding loop", options=lambda: {"custom_generate": lambda model, input_ids, **_: input_ids + 1}
    ),
    "no cache": Case("use_cache=False", options=lambda: {**BEAM, "use_cache": False}),
    "static cache": Case("the cache is a StaticCache", options=lambda: {**BEAM, "cache_implementation": "static"}),
    "own static cache": Case(
        "the cache is a StaticCache",
        options=lambda: {
            **SAMPLE,
            **releases.with_cache(transformers.StaticCache(config=LLAMA.build().config, max_cache_len=100)),
        },
    ),
    "cache that differs between beams": Case(
        "differs between the sequences of an input",
        options=lambda: {**BEAM, **releases.with_cache(_prefilled(LLAMA, 4))},
        inputs=lambda: LLAMA.make_inputs(padding=None),
    ),
    "longer than the sliding window, no captured step": Case(
        "more positions than the sliding window", build=MISTRAL.build, options=dict, inputs=MISTRAL.make_inputs
    ),
    "more to generate than the sliding window, no captured step": Case(
        "more positions than the sliding window",
        build=MISTRAL.build,
        options=lambda: {**BEAM, "max_new_tokens": 45, "min_new_tokens": 45},
        inputs=MISTRAL.make_inputs,
    ),
    "attentions of a sliding window": Case(
        "as long as the sliding window",
        build=lambda: MISTRAL.build("eager"),
        options=lambda: {**BEAM, "return_dict_in_generate": True, "output_attentions": True},
        inputs=MISTRAL.make_inputs,
    ),
    "part in training mode": Case("training mode", build=_changed(lambda model: model.model.layers[1].mlp.train())),
    "model that ignores the cache": Case(
        "does not use the cache",
        build=OTHERS_BY_NAME["openai-gpt"].build,
        inputs=OTHERS_BY_NAME["openai-gpt"].make_inputs,
    ),
    "training mode": Case("training mode", build=_changed(lambda model: model.train())),
    "replaced forward": Case("forward has been replaced", build=_changed(_replace_forward)),
    "forward hook": Case(
        "forward hooks",
        build=_changed(lambda model: model.model.layers[0].register_forward_hook(lambda module, args, out: None)),
    ),
    "forward pre-hook": Case(
        "forward hooks",
        build=_changed(lambda model: model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))),
    ),
    "own forward": Case("OwnForward.forward is not the library's own", build=_own("forward", "OwnForward")),
    "own preparation of inputs": Case(
        "OwnInputs.prepare_inputs_for_generation is not the", build=_own("prepare_inputs_for_generation", "OwnInputs")
    ),
    "own reordering": Case("reorders its cache itself", build=_own("_reorder_cache", "OwnReorder")),
    "own loop": Case("a decoding loop of its own", build=_own("_sample", "OwnLoop"), options=lambda: SAMPLE),
    "state of its own": Case("keeps state other than K/V", build=OTHERS_BY_NAME["recurrent-gemma"].build),
    "own bookkeeping": Case("reorders its cache itself", build=OTHERS_BY_NAME["xlnet"].build),
    "chunked attention": Case("chunked attention", build=OTHERS_BY_NAME["llama4"].build),
    "chosen values": Case("chooses among the values of the cache", build=OTHERS_BY_NAME["doge"].build),
}


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace(" ", "-"))
def test_reason(name: str) -> None:
    case = CASES[name]
    model, inputs = case.build(), case.inputs()

    def call() -> Any:
        options = case.options()
        return run(model, inputs, lambda: options), releases.cache_in(options)

    with fastgen.disabled():
        original = call()
    assert_same(original, call())
    assert accelerated() == 0
    assert [(case.reason in reason, count) for reason, count in fallbacks().items()] == [(True, 1)], fallbacks()


def _quantized_dynamically(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)


def _one_projection(training: bool) -> Callable[[Any], Any]:
    return lambda model: model.model.layers[1].mlp.up_proj.train(training)


@pytest.mark.parametrize("change", [_quantized_dynamically, _one_projection(True)], ids=["dynamic", "linear"])
def test_torchs_layers_that_are_the_same_in_training_mode(change: Callable[[Any], Any]) -> None:
    model = _changed(change)()
    assert any(module.training for module in model.modules())
    check(model, LLAMA.make_inputs(), BEAM)
    assert accelerated() == 1 and not fallbacks()


_OTHERS_IN_TRAINING = {
    "dropout": torch.nn.Dropout(),
    "a random slope": torch.nn.RReLU(),
    "batch norm": torch.nn.BatchNorm1d(4),
    "instance norm": torch.nn.InstanceNorm1d(4, track_running_stats=True),
    "a hook": torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4)),
}


@pytest.mark.parametrize("layer", _OTHERS_IN_TRAINING.values(), ids=_OTHERS_IN_TRAINING)
def test_torchs_layers_that_are_others_in_training_mode(layer: torch.nn.Module) -> None:
    model = _changed(lambda model: model.model.layers[1].mlp.register_module("other", layer))()
    check(model, LLAMA.make_inputs(), BEAM)
    assert list(fallbacks()) == ["the model, or a part of it, is in training mode"]


@pytest.mark.parametrize("name", ["no cache", "training mode", "own forward"])
def test_strict_raises_instead(name: str) -> None:
    case = CASES[name]
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match=case.reason):
        run(case.build(), case.inputs(), case.options())
    with fastgen.disabled():
        run(case.build(), case.inputs(), case.options())


@pytest.mark.parametrize(
    "draft",
    [
        lambda: {"assistant_model": BY_NAME["qwen2"].build()},
        lambda: {"prompt_lookup_num_tokens": 3},
        lambda: {"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3, eos_token_id=EOS)},
    ],
    ids=["assistant", "prompt lookup", "configuration"],
)
@pytest.mark.parametrize("options", [BEAM, {**BEAM, "do_sample": True}], ids=["beams", "sampled"])
def test_no_fallback_with_beams(draft: Callable[[], dict[str, Any]], options: dict[str, Any]) -> None:
    """The library ignores the draft then: the call is plain beam search."""
    check(LLAMA.build(), LLAMA.make_inputs(), {**options, **draft()})
    assert (accelerated(), fallbacks()) == (1, {})


@pytest.mark.parametrize("loop", [None, fastgen.decode], ids=["hooks", "decode"])
@pytest.mark.parametrize("draft", ["lookup", "lookup of no tokens", "assistant"])
def test_beams_leave_a_draft_unused_with_the_librarys_warnings(
    draft: str, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as without FastGen."""
    said: list[str] = []
    monkeypatch.setattr(transformers.generation.configuration_utils.logger, "warning", said.append)
    made = {
        "lookup": lambda: {"prompt_lookup_num_tokens": 3},
        "lookup of no tokens": lambda: {"prompt_lookup_num_tokens": 0},
        "assistant": lambda: {"assistant_model": LLAMA.build()},
    }
    options = {**BEAM, **made[draft]()}
    with fastgen.disabled():
        run(LLAMA.build(), LLAMA.make_inputs(), options)
    expected, said[:] = list(said), []
    run(LLAMA.build(), LLAMA.make_inputs(), {**options, "custom_generate": loop})
    assert accelerated() == 1 and said == expected != []


def test_compiled_model() -> None:
    """`model.compile()`, and a model wrapped by torch.compile (with a backend that compiles nothing)."""
    compiled, options = copy.deepcopy(ONE_LAYER.build()), {**BEAM, "max_new_tokens": 2}
    compiled.compile(backend="eager")
    wrapped = torch.compile(ONE_LAYER.build(), backend="eager")
    expected = run(ONE_LAYER.build(), LLAMA.make_inputs(), options)
    for model in (compiled, wrapped):
        assert_same(expected, run(model, LLAMA.make_inputs(), options))


@pytest.mark.parametrize("part", ["a layer", "a wrapped layer", "a method"])
def test_compiled_part(part: str) -> None:
    """The compiler sees only the library's code: FastGen's layers and cache would make it warn, or fail."""
    model = copy.deepcopy(ONE_LAYER.build())
    layers, attention = model.model.layers, model.model.layers[0].self_attn
    if part == "a layer":
        layers[0].compile(backend="eager")
    elif part == "a wrapped layer":
        layers[0] = torch.compile(layers[0], backend="eager")
    else:
        attention.forward = torch.compile(attention.forward, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, LLAMA.make_inputs(), {**BEAM, "max_new_tokens": 4})
    assert fallbacks() == {"the model, or a part of it, is compiled": 1}


@pytest.mark.parametrize(
    "options",
    [
        {**BEAM, "cache_implementation": "offloaded"},
        {**SAMPLE, "cache_implementation": "offloaded_static"},
        {**SAMPLE, "cache_implementation": "quantized"},
        {**BEAM, "synced_gpus": True},
        {**BEAM, "streamer": transformers.TextStreamer(tokenizer=None)},
    ],
    ids=lambda options: list(options)[-1],
)
def test_same_outcome(options: dict[str, Any]) -> None:
    """Also if the original raises, for want of a device, a package or a process group."""

    def call() -> Any:
        model = copy.deepcopy(LLAMA.build())  # it keeps a cache that it has made, even an unusable one
        try:
            return run(model, LLAMA.make_inputs(), options)
        except Exception as error:
            return type(error), str(error)

    with fastgen.disabled():
        original = call()
    assert_same(original, call())
    assert accelerated() == 0


def test_attention_backend_of_another_kind() -> None:
    model = copy.deepcopy(LLAMA.build())
    original = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register("of_the_tests", original)
    transformers.AttentionMaskInterface.register(
        "of_the_tests", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    model.set_attn_implementation("of_the_tests")
    check(model, LLAMA.make_inputs(), {**BEAM, **SCORES})
    assert list(fallbacks()) == ["attention implementation of_the_tests"]


def test_rows_of_an_input_that_differ() -> None:
    """The model expands its inputs in its own way."""
    model = copy.deepcopy(LLAMA.build())

    def expand(expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **named: Any) -> Any:
        tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
        expanded = {key: value.repeat(expand_size, 1) for key, value in tensors.items()}
        return input_ids.repeat(expand_size, 1), named | expanded

    model._expand_inputs_for_generation = expand
    check(model, LLAMA.make_inputs(), {**SAMPLE, **SCORES})
    assert list(fallbacks()) == ["input_ids is not one row per sequence, equal for the sequences of an input"]
