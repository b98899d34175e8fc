"""Decoding steps captured in a graph (simulated on the CPU): the same results, and declined where that is not sure."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

import fastgen
from fastgen.decoding import norms
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.reader import StepReader
from fastgen.ops import triton as operators
from fastgen.optimizer.transformers.captured import kept, loop
from fastgen.optimizer.transformers.captured.step import CapturedStep
from tests.equivalence.captured import BY_RELEASE, CalledGraph, Graph, on_the_cpu, reasons
from tests.equivalence.check import assert_same, check, run
from tests.equivalence.models import BY_NAME, EOS, Family
from tests.equivalence.others import OTHERS
from tests.models import tiny_unilm

KNOWN = {family.name: family for family in (*BY_NAME.values(), *OTHERS)}
FAMILIES = [BY_NAME[name] for name in ("bart", "t5", "gpt2", "llama")]
NEW = {"max_new_tokens": 24, "do_sample": False}
BEAMS = {**NEW, "num_beams": 3}
GREEDY = {**NEW, "num_beams": 1}

every = pytest.mark.parametrize("family", FAMILIES, ids=str)
two = pytest.mark.parametrize("family", [BY_NAME["bart"], BY_NAME["llama"]], ids=str)


@pytest.fixture(autouse=True)
def captured(device: torch.device) -> Any:
    """A real graph on a GPU, a simulated one elsewhere."""
    if device.type == "cuda":
        kept.drop_all()
        yield
        return
    with on_the_cpu():
        yield


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each replay of a graph."""
    found: list[None] = []
    kind = graph.Graph
    original = kind.replay
    monkeypatch.setattr(kind, "replay", lambda self: (found.append(None), original(self))[1])
    return found


def captures() -> int:
    """Calls with a captured step since the counts were set to zero."""
    return fastgen.stats().get(loop.ENTRY_POINT, {"accelerated": 0})["accelerated"]


def build(family: Family, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """A model of the test's own, and inputs."""
    return copy.deepcopy(family.build()).to(device), to(device, family.make_inputs())


def to(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in inputs.items()}


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
    "processor of the host": {**BEAMS, "exponential_decay_length_penalty": (6, 1.2), "epsilon_cutoff": 0.0},
}


@every
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_tokens(family: Family, options: dict[str, Any], device: torch.device, replays: list[None]) -> None:
    """Twice: with a graph that is captured, and with one that is kept."""
    model, inputs = build(family, device)
    check(model, inputs, options)
    assert captures() == 1, reasons()
    made = Graph.made
    check(model, inputs, options)
    assert captures() == 2 and Graph.made == made
    assert replays


@every
def test_calls_of_one_shape_share_a_step(family: Family, device: torch.device) -> None:
    """Whatever is in the buffers of the call before: fewer inputs, shorter ones, other limits."""
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
NOT_CAPTURED = {"switch", "gpt-neo", "ctrl", "bert", "falcon", "falcon-alibi"}
NOT_ACCELERATED = {"mpt", "xlnet", "openai-gpt", "llama4", "mamba", "rwkv", "recurrent-gemma", "jamba"}


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in NOT_ACCELERATED])
def test_every_model(name: str, device: torch.device) -> None:
    model, inputs = build(KNOWN[name], device)
    check(model, inputs, {**BEAMS, "min_new_tokens": 12})
    assert captures() + sum(reasons().values()) == 1
    assert name in BY_RELEASE or captures() == (name not in NOT_CAPTURED), reasons()


@pytest.mark.parametrize("name", ["m2m100", "xglm", "led", "mvp", "plbart", "fsmt", "longt5"])
def test_models_that_ask_for_the_length(name: str, device: torch.device) -> None:
    """Is there anything in the cache, is the table of positions long enough: the buffers' bounds say that."""
    model, inputs = build(KNOWN[name], device)
    options = {**BEAMS, "min_new_tokens": 12}
    for _ in range(2):
        check(model, inputs, options)
    assert captures() == 2, reasons()


def test_a_table_that_may_be_too_short(device: torch.device) -> None:
    """It would be made anew in some step: that is not captured."""
    model, inputs = build(BY_NAME["m2m100"], device)
    inputs = {name: value[:, :9] for name, value in inputs.items()}
    for part in (model.model.encoder, model.model.decoder):
        part.embed_positions.make_weights(16, model.config.d_model, model.config.pad_token_id)
    check(model, inputs, {**BEAMS, "min_new_tokens": 20})
    (reason,) = reasons()
    assert "waits for the device" in reason and captures() == 0


@pytest.mark.parametrize("name", ["mistral-short-window", "mistral-long-window", "gemma2", "gpt-oss", "starcoder2"])
def test_sliding_windows(name: str, device: torch.device) -> None:
    """Longer than what there is, and shorter: positions leave it in the prompt and behind it."""
    model, inputs = build(KNOWN[name], device)
    options = {**BEAMS, "max_new_tokens": 36, "min_new_tokens": 36}
    for part in (slice(None), slice(-12, None)):
        less = {key: value[:, part] for key, value in inputs.items()}
        check(model, less, options)
        check(model, less, options)
    assert captures() == 4, reasons()


PROPHETNET = {
    "beams": {**BEAMS, "no_repeat_ngram_size": 3},
    "greedy": GREEDY,
    "a prompt": {**BEAMS, "decoder_input_ids": torch.tensor([[1, 20, 21], [1, 30, 31], [1, 40, 41]])},
}


@pytest.mark.parametrize("options", PROPHETNET.values(), ids=PROPHETNET)
def test_prophetnet(options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams with a column of their own, and buckets of distances in buffers longer than what is in them."""
    monkeypatch.setattr(loop, "_MOST_FIRST_ROOM", 16)
    model, inputs = build(BY_NAME["prophetnet"], device)
    options = {**options, "max_new_tokens": 36, "min_new_tokens": 30}  # more than the distance of the last bucket
    if "decoder_input_ids" in options:
        options["decoder_input_ids"] = options["decoder_input_ids"].to(device)
    for _ in range(2):
        check(model, inputs, options)
    assert captures() == 2, reasons()


UNILM = {
    "beams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "greedy": {},
    "returned": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0},
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", UNILM.values(), ids=UNILM)
def test_unilm(options: dict[str, Any], side: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step stores two positions and drops one, behind a source that self-attention has stored."""
    monkeypatch.setattr(loop, "_MOST_FIRST_ROOM", 8)
    bias, read = StepReader._bias, []

    def recording(reader: StepReader, *args: Any) -> Any:
        read.append(bias(reader, *args))
        return read[-1]

    monkeypatch.setattr(StepReader, "_bias", recording)
    model = tiny_unilm.tiny_model(end=3.0).to(device)
    inputs = to(device, tiny_unilm.batch(tiny_unilm.sources(44, 12, 37), side))
    options = {"max_new_tokens": 24, "min_new_tokens": 12, **options}
    for _ in range(2):
        check(model, inputs, options)
    assert captures() == 2, reasons()
    assert read and all(given is None for given in read)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unilm_with_a_target_that_is_given(attention: str, device: torch.device) -> None:
    model = tiny_unilm.tiny_model(end=3.0, attn_implementation=attention).to(device)
    inputs = tiny_unilm.batch(tiny_unilm.sources(40, 20), "left")
    inputs["decoder_input_ids"] = torch.tensor([[tiny_unilm.PAD, 20, 21], [tiny_unilm.PAD, 30, 31]])
    for _ in range(2):
        check(model, to(device, inputs), {"num_beams": 4, "max_new_tokens": 14, "min_new_tokens": 12})
    assert captures() == 2, reasons()


def test_unilm_up_to_its_last_position(device: torch.device) -> None:
    """With one more the model says that it has no more, should the search get there."""
    model = tiny_unilm.tiny_model(end=-100.0, max_position_embeddings=60).to(device)
    inputs = to(device, tiny_unilm.batch(tiny_unilm.sources(44, 30)))
    check(model, inputs, {"num_beams": 2, "max_new_tokens": 16})
    assert captures() == 1, reasons()
    with pytest.raises(ValueError, match="but the model has 60"):
        run(model, inputs, {"num_beams": 2, "max_new_tokens": 17})
    assert reasons() == {"more positions than the model has": 1}


class Counting(LogitsProcessor):
    """A processor of the user's, with state: bans a token that depends on how often it has been called."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, (input_ids[:, -1].sum() + len(self.lengths)) % scores.shape[1]] = -float("inf")
        return scores


@every
def test_the_users_processors_run_between_two_graphs(family: Family, device: torch.device) -> None:
    model, inputs = build(family, device)
    seen = []
    for disabled in (True, False):
        processor = Counting()
        options = {**BEAMS, "logits_processor": LogitsProcessorList([processor])}
        with fastgen.disabled() if disabled else contextlib.nullcontext():
            seen.append((run(model, inputs, options), processor.lengths))
    assert_same(*seen)
    assert captures() == 1


class Failing(Counting):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.lengths) == 5:
            raise ZeroDivisionError("mine")
        return super().__call__(input_ids, scores)


@every
def test_what_the_users_processor_raises_is_passed_on(family: Family, device: torch.device) -> None:
    model, inputs = build(family, device)
    processor = Failing()
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(model, inputs, {**BEAMS, "logits_processor": LogitsProcessorList([processor])})
    assert len(processor.lengths) == 5  # once, not once more on another way
    check(model, inputs, BEAMS)


class Stopping(StoppingCriteria):
    """A criterion of the user's, with state: ends what has a token that depends on how often it has been called."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert scores is None
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -1] + len(self.lengths)) % 7 == 0


def criteria(encoder_decoder: bool = False) -> dict[str, Any]:
    """What each call gets: objects of its own."""
    return {
        "the user's": Stopping(),
        "a function": lambda ids, scores: (ids[:, -1] % 9 == 1) & (ids.shape[1] > 8),
        "a length": MaxLengthCriteria(9 if encoder_decoder else 53),
        "no time": MaxTimeCriteria(0.0),
        "much time": MaxTimeCriteria(1000.0),
    }


@two
@pytest.mark.parametrize("name", criteria())
def test_stopping_criteria(family: Family, name: str, device: torch.device) -> None:
    """The host runs them in every step, as often as the library does, and on the same continuations."""
    model, inputs = build(family, device)
    processors = {"logits_processor": LogitsProcessorList([Counting()])} if name == "the user's" else {}
    for decoding in (BEAMS, {**GREEDY, "eos_token_id": None}):
        seen = []
        for disabled in (True, False, False):
            criterion = criteria(family.encoder_decoder)[name]
            options = {**decoding, "stopping_criteria": StoppingCriteriaList([criterion]), **copy.deepcopy(processors)}
            with fastgen.disabled() if disabled else contextlib.nullcontext():
                seen.append((run(model, inputs, options), getattr(criterion, "lengths", None)))
        assert_same(*seen[:2])
        assert_same(seen[0], seen[2])
    assert captures() == 4, reasons()


@two
def test_stop_strings(family: Family, device: torch.device, tokenizer: Any) -> None:
    model, inputs = build(family, device)
    for decoding in (BEAMS, GREEDY):
        check(model, inputs, {**decoding, "stop_strings": ["ac", "ifa", "gg", "lb", "eed"], "tokenizer": tokenizer})
    assert captures() == 2, reasons()


def test_what_the_users_criterion_raises_is_passed_on(device: torch.device) -> None:
    model, inputs = build(BY_NAME["bart"], device)

    class Fails(Stopping):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            super().__call__(*args, **kwargs)
            return torch.tensor([len(self.lengths) > 5 and 1 / 0])

    criterion = Fails()
    with pytest.raises(ZeroDivisionError):
        run(model, inputs, {**BEAMS, "min_new_tokens": 12, "stopping_criteria": StoppingCriteriaList([criterion])})
    assert len(criterion.lengths) == 6  # once, not once more on another way


RETURNED = ["bart", "t5", "gpt2", "llama", "prophetnet", "mistral-short-window"]


@pytest.mark.parametrize("name", [*RETURNED, "unilm"])
def test_what_is_returned_besides_the_tokens(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache as the library leaves it, also when the step was exchanged, and when steps ran past the end."""
    monkeypatch.setattr(loop, "_MOST_FIRST_ROOM", 8)
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
    if name != "mistral-short-window":  # with one sequence, the library does not read more than the window
        calls.append({**GREEDY, "min_new_tokens": 10})
    for options in calls:
        found = check(model, inputs, {**options, "return_dict_in_generate": True})
        assert found.past_key_values.get_seq_length() > 0
    assert captures() == len(calls), reasons()


@every
def test_capacity_grows(family: Family, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_MOST_FIRST_ROOM", 8)
    model, inputs = build(family, device)
    options = {**BEAMS, "min_new_tokens": 30, "max_new_tokens": 30}
    for _ in range(2):
        check(model, inputs, options)
    assert captures() == 2, reasons()
    assert sorted(shape.capacity for shape in kept._of(model).steps) == [8, 16, 32]


def test_the_prompt_is_stored_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the step has been captured, what the first pass has stored is gone: the step has a copy."""
    held: list[weakref.ref[torch.Tensor]] = []
    begin, replay = CapturedStep.begin, graph.Graph.replay
    alive = []

    def recording(step: CapturedStep, prompt: Any, *args: Any, **kwargs: Any) -> None:
        held.extend(weakref.ref(part) for kv in (*prompt.own, *prompt.cross) for part in kv)
        begin(step, prompt, *args, **kwargs)

    def looking(made: Any) -> None:
        alive.append(sum(part() is not None for part in held))
        replay(made)

    monkeypatch.setattr(CapturedStep, "begin", recording)
    monkeypatch.setattr(graph.Graph, "replay", looking)
    run(*build(BY_NAME["bart"], device), {**BEAMS, "min_new_tokens": 12})
    assert held and alive[0] == len(held)
    assert not any(alive[1:])


def test_other_weights(device: torch.device) -> None:
    """What is written into a parameter, a replay reads; another parameter needs another graph."""
    model, inputs = build(BY_NAME["gpt2"], device)
    options = {**GREEDY, "min_new_tokens": 24}
    first = run(model, inputs, options)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(-1.0)
    assert check(model, inputs, options).tolist() != first.tolist()
    made = Graph.made
    model.transformer.h[0].mlp.c_fc.weight = torch.nn.Parameter(-model.transformer.h[0].mlp.c_fc.weight.detach())
    check(model, inputs, options)
    assert captures() == 3
    assert device.type == "cuda" or Graph.made == made + 1


class _Adapter(torch.nn.Module):
    """A layer with changes to it that are switched on and off, as adapters are: by attributes that are no tensors."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.active, self.scaling = layer, ["first"], {"first": 1.0, "second": -2.0}
        self.changes = torch.nn.ParameterDict({name: torch.randn_like(layer.weight) for name in self.scaling})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + sum(self.scaling[name] * (x @ self.changes[name].T) for name in self.active)


def test_other_settings_of_modules(device: torch.device) -> None:
    """A graph has frozen them: none is replayed with others."""
    model, inputs = build(BY_NAME["llama"], device)
    layer = model.model.layers[0]
    layer.mlp.down_proj = adapter = _Adapter(layer.mlp.down_proj).to(device).eval()
    options = {**GREEDY, "min_new_tokens": 24}
    found = [check(model, inputs, options).tolist()]

    def change(owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        found.append(check(model, inputs, options).tolist())

    change(adapter, "active", ["second"])
    change(adapter, "active", [])
    adapter.active.append("first")
    change(adapter, "scaling", {"first": 5.0, "second": 1.0})
    change(layer.self_attn, "scaling", 9.0)
    assert all(one != other for one, other in itertools.pairwise(found))
    made = Graph.made
    check(model, inputs, options)
    assert captures() == 6 and Graph.made == made, reasons()


def test_steps_that_take_much_memory_are_not_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(BY_NAME["bart"], device)
    one = {name: value[:1] for name, value in inputs.items()}
    check(model, one, BEAMS)
    (step,) = kept._of(model).steps.values()
    monkeypatch.setattr(kept, "_most_bytes", lambda device: step.nbytes * 1.5)
    check(model, one, {**BEAMS, "num_beams": 2})  # there is no room for both
    (other,) = kept._of(model).steps.values()
    assert other is not step
    check(model, inputs, BEAMS)  # nor for this one alone
    assert not kept._of(model).steps and captures() == 3


def test_memory_of_kept_steps_is_the_original_codes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out because of them does not end a call."""
    model, inputs = build(BY_NAME["gpt2"], device)
    check(model, inputs, BEAMS)
    forward, failed = type(model).forward, []

    def needs_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kept._models:
            failed.append(None)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **kwargs)

    functools.update_wrapper(needs_memory, forward)
    monkeypatch.setattr(type(model), "forward", needs_memory)
    found = run(model, inputs, BEAMS)
    assert len(failed) == 1
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"out of memory: captured steps were kept": 1}
    with fastgen.disabled():
        assert_same(found, run(model, inputs, BEAMS))


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["rows", "beams"])
def test_experts_are_those_of_the_librarys_loop(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, it has another implementation for steps than for the first pass; not in beam search."""
    model, inputs = build(KNOWN["mixtral"], device)
    active: list[bool] = [False]
    seen = set()
    forward = type(model).forward

    @contextlib.contextmanager
    def optimize(self: Any) -> Any:
        active.append(True)
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
    assert seen == ({False, True} if options is GREEDY else {False})


def test_a_limited_number_of_steps_is_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 2)
    models = [build(BY_NAME[name], device) for name in ("gpt2", "bart", "llama")]
    for _ in range(2):
        for model, inputs in models:
            check(model, inputs, BEAMS)
    assert captures() == 6
    assert sum(len(of_model.steps) for of_model in kept._models.values()) == 2


def test_steps_go_with_their_model(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    run(model, inputs, BEAMS)
    (step,) = kept._of(model).steps.values()
    held = weakref.ref(step)
    del step, model
    gc.collect()
    assert held() is None


def test_disable_frees_them(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    run(model, inputs, BEAMS)
    fastgen.disable()
    assert not kept._models


def test_threads(device: torch.device) -> None:
    """Several models, and one model several times."""
    first, second = build(BY_NAME["gpt2"], device), build(BY_NAME["bart"], device)
    with fastgen.disabled():
        wanted = [run(*both, BEAMS) for both in (first, second)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        model, inputs = (first, second)[number % 2]
        for _ in range(2):
            found[number] = model.generate(**copy.deepcopy(inputs), **BEAMS)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in found.items():
        assert result.tolist() == wanted[number % 2].tolist()
    assert len(found) == 4 and captures() == 8


def test_with_the_kernels(device: torch.device, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, interpreted where there is no GPU. The simulated graph does not see them: steps are called there."""
    names = ["bart", "t5", "gpt2", "llama"]
    if device.type != "cuda":
        monkeypatch.setattr(graph, "Graph", CalledGraph)
        monkeypatch.setattr(operators, "is_interpreted", lambda: True)
        names = ["t5"]  # the interpreter is slow
    normalised: list[str] = []
    normalise = norms.normalise
    monkeypatch.setattr(norms, "normalise", lambda x, *layer: normalised.append(name) or normalise(x, *layer))
    for name in names:
        model, inputs = build(BY_NAME[name], device)
        less = {key: value[:1] for key, value in inputs.items()}
        check(model, less, {**BEAMS, "num_beams": 2, "max_new_tokens": 8})
    assert captures() == len(names), reasons()
    assert set(normalised) == {"t5", "llama"} & set(names)


def test_threads_that_the_users_code_waits_for(device: torch.device) -> None:
    """A processor may leave a call of another model to a thread, and wait for it."""
    (model, inputs), (other, its_inputs) = (build(BY_NAME[name], device) for name in ("gpt2", "llama"))
    threads: list[threading.Thread] = []

    class Waiting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            work = threading.Thread(target=other.generate, kwargs={**its_inputs, **GREEDY}, daemon=True)
            work.start()
            work.join(timeout=60)
            assert not work.is_alive(), "it waits for the call that waits for it"
            threads.append(work)
            return scores

    check(model, inputs, lambda: {**BEAMS, "logits_processor": LogitsProcessorList([Waiting()])})
    assert threads and captures() > len(threads) // 2


# ---- sampling


def test_samples_have_the_distribution(device: torch.device) -> None:
    """Each token as often as its probability says, given what is in front of it."""
    model, inputs = build(BY_NAME["gpt2"], device)
    one = {name: value[:1] for name, value in inputs.items()}
    count = 600
    options = {"do_sample": True, "top_k": 4, "max_new_tokens": 10, "min_new_tokens": 10, "num_return_sequences": count}
    torch.manual_seed(0)
    found = model.generate(**one, **options)
    assert captures() == 1, reasons()
    width = one["input_ids"].shape[1]
    # The fourth token: drawn in a replay. Compared over all histories, with the probabilities of each.
    with torch.no_grad():
        logits = model(found[:, : width + 3]).logits[:, -1]
    logits[:, EOS] = -float("inf")
    best = logits.topk(4, dim=1)
    expected = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(dim=1)).sum(dim=0)
    drawn = torch.bincount(found[:, width + 3], minlength=logits.shape[1])
    assert (drawn[expected == 0] == 0).all()
    deviation = (drawn - expected).abs() / expected.clamp(min=1).sqrt()
    assert deviation.max() < 4.5


def test_samples_follow_the_seed(device: torch.device) -> None:
    model, inputs = build(BY_NAME["llama"], device)
    options = {"do_sample": True, "max_new_tokens": 16, "min_new_tokens": 16}
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        results.append(model.generate(**inputs, **options).tolist())
    assert results[0] == results[2] != results[1]
    assert captures() == 3


# ---- declined


DECLINED = {
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "beam search with sampling": {"do_sample": True},
    "only a few tokens to generate": {"max_new_tokens": 4},
}


@every
@pytest.mark.parametrize(("reason", "options"), DECLINED.items(), ids=DECLINED)
def test_declined(family: Family, reason: str, options: dict[str, Any], device: torch.device) -> None:
    """The call goes on as if there were no captured step, and the reason is counted."""
    model, inputs = build(family, device)
    fastgen.enable(strict=True)  # no fallback: the call is accelerated
    check(model, inputs, lambda: {**BEAMS, **options})  # scores from a function are not left out
    assert reasons() == {reason: 1} and captures() == 0


def test_a_criterion_that_fills_up(device: torch.device) -> None:
    """The library looks for the attribute, and pads what has ended then."""
    model, inputs = build(BY_NAME["gpt2"], device)

    class Ends(EosTokenCriteria):
        pass

    criteria = StoppingCriteriaList([Ends(torch.tensor(11, device=device))])
    check(model, inputs, {**GREEDY, "stopping_criteria": criteria})
    assert reasons() == {"the stopping criterion Ends": 1}


def test_a_criterion_for_a_larger_length(device: torch.device) -> None:
    """It takes the place of the library's."""
    model, inputs = build(BY_NAME["bart"], device)
    options = {**GREEDY, "min_new_tokens": 40, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(35)])}
    found = check(model, inputs, options)
    assert found.shape[1] == 35
    assert reasons() == {"a criterion for a larger length than max_length": 1}


def test_a_mask_with_holes(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    inputs["attention_mask"][:, 1] = 0
    inputs["attention_mask"][:, 0] = 1
    check(model, inputs, BEAMS)
    assert reasons() == {"a mask with holes": 1}


@every
def test_an_input_that_is_masked_altogether(family: Family, device: torch.device) -> None:
    model, inputs = build(family, device)
    inputs["attention_mask"][1] = 0
    check(model, inputs, BEAMS)
    assert reasons() == {"an input that is masked altogether": 1}


def test_a_model_that_counts_the_keys(device: torch.device) -> None:
    """GPT-Neo finds its local window by the number of keys, also in a call that ends before anything is captured."""
    kind = transformers.GPTNeoConfig(
        vocab_size=100, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=128, initializer_range=0.6, bos_token_id=1,
        eos_token_id=list(range(100)),
    )  # fmt: skip
    model = transformers.GPTNeoForCausalLM(kind).eval().to(device)
    ids = torch.randint(3, 99, (2, 20), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {**GREEDY, "min_new_tokens": 2, "pad_token_id": 0}
    check(model, inputs, lambda: {**options, "logits_processor": LogitsProcessorList([Counting()])})
    assert reasons() == {"a model that the library does not run with a static cache": 1}


def test_never(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    fastgen.enable(captured_step="never")
    check(model, inputs, BEAMS)
    assert captures() == 0 and reasons() == {}


@every
@pytest.mark.parametrize("which", ["first step", "capture"])
def test_a_step_that_cannot_be_captured(
    family: Family, which: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's loop takes over from the first pass, and it is not tried again."""
    model, inputs = build(family, device)
    tries = []

    def fail(*args: Any) -> None:
        tries.append(None)
        raise RuntimeError("planted")

    if which == "capture":
        monkeypatch.setattr(graph.Graph, "capture", fail)
    else:
        monkeypatch.setattr(CapturedStep, "_warm_up", fail)
    for _ in range(2):
        check(model, inputs, BEAMS)
    (reason,) = reasons()
    assert "planted" in reason and reasons() == {reason: 2} and captures() == 0
    assert len(tries) == 1
    monkeypatch.undo()


def test_sampling_goes_on_from_the_same_random_state(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.Graph, "capture", lambda *args: 1 / 0)
    model, inputs = build(BY_NAME["gpt2"], device)
    check(model, inputs, {**NEW, "do_sample": True})
    (reason,) = reasons()
    assert "ZeroDivisionError" in reason


def test_out_of_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything kept is freed, and the call goes on without; another one may try again."""
    model, inputs = build(BY_NAME["gpt2"], device)
    run(model, inputs, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(CapturedStep, "begin", lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        check(model, inputs, BEAMS)
    assert reasons() == {"out of memory": 1}
    assert not kept._models
    check(model, inputs, BEAMS)
    assert captures() == 2


def test_a_model_that_reads_the_encoders_output(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not stored with K and V; the NaN in its place are seen in the first step."""
    model, inputs = build(BY_NAME["bart"], device)
    forward = model.forward

    def reading(*args: Any, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        outputs = forward(*args, encoder_outputs=encoder_outputs, **kwargs)
        outputs.logits = outputs.logits + encoder_outputs[0].mean()
        return outputs

    monkeypatch.setattr(type(model), "forward", lambda self, *args, **kwargs: reading(*args, **kwargs))
    type(model).forward.__module__ = "transformers.models.bart.modeling_bart"
    run(model, inputs, BEAMS)
    (reason,) = reasons()
    assert "encoder's output" in reason


def test_autocast(device: torch.device) -> None:
    """It keeps copies of weights, which are gone when it ends."""
    model, inputs = build(BY_NAME["bart"], device)
    with torch.autocast(device.type, torch.bfloat16):
        run(model, inputs, BEAMS)
    assert reasons() == {"autocast": 1}
    check(model, inputs, BEAMS)
    assert captures() == 1


def test_with_and_without_inference_mode(device: torch.device) -> None:
    model, inputs = build(BY_NAME["bart"], device)
    for context in (torch.inference_mode(), torch.no_grad(), torch.inference_mode()):
        with context:
            check(model, inputs, BEAMS)
    assert captures() == 3, reasons()


def test_errors_of_a_call_are_not_held_against_its_shape(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    with monkeypatch.context() as patch:
        patch.setattr(CapturedStep, "begin", lambda *args, **kwargs: 1 / 0)
        check(model, inputs, BEAMS)
    check(model, inputs, BEAMS)
    assert list(reasons().values()) == [1] and captures() == 1


def test_samples_of_what_is_no_probability(device: torch.device) -> None:
    """The original code says so."""
    model, inputs = build(BY_NAME["llama"], device)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    message = "probability tensor contains either"
    if device.type == "cuda":
        pytest.skip("there, the original code's error ends the process")
    with pytest.raises(RuntimeError, match=message):
        run(model, inputs, {**NEW, "do_sample": True})


# ---- masks


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "whisper"])
def test_attention_of_the_models_own(name: str, device: torch.device) -> None:
    """Spelled out as matrix products, without a mask of the encoder's output: what fills the buffers is left out."""
    family = BY_NAME[name]
    model = copy.deepcopy(family.build("eager")).to(device)
    inputs = {key: value.to(device) for key, value in family.make_inputs(length=7, padding=None).items()}
    inputs.pop("attention_mask" if family.encoder_decoder else "", None)
    for _ in range(2):
        check(model, inputs, BEAMS)
    assert captures() == 2, reasons()


def test_masks_that_say_nothing_new_are_not_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths on the device leave out the padding; T5's masks, which hold position biases, are read."""
    read: dict[str, list[bool]] = {}
    bias = StepReader._bias

    def recording(reader: StepReader, *args: Any) -> Any:
        result = bias(reader, *args)
        read[name].append(result is not None)
        return result

    monkeypatch.setattr(StepReader, "_bias", recording)
    for name in ("bart", "gpt2", "llama", "t5"):
        read[name] = []
        check(*build(BY_NAME[name], device), BEAMS)
    assert not any(read["bart"] + read["gpt2"] + read["llama"])
    assert any(read["t5"]) or not read["t5"]  # before transformers 5.17, T5 spells its attention out
