"""What the user's own code raises reaches the caller, and is no reason to run that code again.

The user's code is what the caller passes to `generate` to be called: processors, criteria, the prefix function, the
streamer, and the processors that a generation config makes, in many forms.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import releases
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.cache_layers import SharedLayer
from tests import near_ties
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import accelerated, assert_same, check, fallbacks, run
from tests.equivalence.models import EOS, VOCABULARY
from tests.equivalence.test_failures import break_
from tests.equivalence.user_code import AT, BART, LLAMA, MyError, Never, Raises, assert_passed_on, loop_of

loops = pytest.mark.parametrize("loop", ["library", "captured"])
named = {"ids": lambda name: name.replace(" ", "-")}


ERRORS = (
    RuntimeError("mine"),
    StopIteration("mine"),
    AttributeError("mine"),
    AssertionError(),
    KeyboardInterrupt("mine"),
    SystemExit(3),
    GeneratorExit("mine"),
    torch.OutOfMemoryError("mine"),
    NotImplementedError("mine"),
)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_every_error(error: BaseException) -> None:
    """Raised by a function, whose state is not restored: a second call of it would be seen."""
    mine = Raises(error)
    assert_passed_on(LLAMA, {**BEAM, "logits_processor": [partial(_hit, mine)]}, mine)


# ---- objects with methods


class Processor(Raises, LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self.hit(scores)


class Criterion(Raises, Never):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return self.hit(super().__call__(input_ids, scores))


class Pretends(Processor):
    """Claims to be the library's."""

    __module__ = "transformers.generation.logits_process"


class Asked(Criterion):
    """Has an attribute that is code."""

    @property
    def eos_token_id(self) -> int:
        self.calls = AT - 1
        return self.hit(EOS)


class EndsBadly(Raises, BaseStreamer):
    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        self.calls = AT - 1
        self.hit()


class Config(WatermarkingConfig):
    """A part of a generation config that makes a processor of the user's."""

    mine: Raises

    def construct_processor(self, *args: Any, **kwargs: Any) -> Any:
        return self.mine

    def validate(self) -> None:
        pass

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Processors(LogitsProcessorList):
    """The library never calls it: it takes the processors out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")


class FailsToIterate(LogitsProcessorList):
    mine: Raises

    def __iter__(self) -> Any:
        self.mine.calls = AT - 1
        self.mine.hit()


def _config(mine: Any, **options: Any) -> dict[str, Any]:
    watermarking = Config()
    watermarking.mine = mine
    return {"generation_config": GenerationConfig(**BEAM, **options, watermarking_config=watermarking)}


def _mock_streamer(mine: Raises) -> dict[str, Any]:
    return {"streamer": Mock(put=Mock(side_effect=lambda value: mine.hit()))}


def _hit(mine: Raises, tokens: Any, scores: Any) -> Any:
    return mine.hit(scores)


def _prefix(mine: Raises) -> PrefixConstrainedLogitsProcessor:
    return PrefixConstrainedLogitsProcessor(lambda row, tokens: mine.hit(list(range(20))), 4)


def _fails_to_iterate(mine: Raises) -> dict[str, Any]:
    given = FailsToIterate([Processor(MyError("never"))])
    given.mine = mine
    return {**BEAM, "logits_processor": given}


OBJECTS: dict[str, tuple[type[Raises], Callable[[Any], dict[str, Any]]]] = {
    "processor of a list": (Processor, lambda mine: {**BEAM, "logits_processor": LogitsProcessorList([mine])}),
    "processor of a list of the user's": (Processor, lambda mine: {**BEAM, "logits_processor": Processors([mine])}),
    "processor of a tuple": (Processor, lambda mine: {**SAMPLE, "logits_processor": (mine,)}),
    "processor that says it is the library's": (Pretends, lambda mine: {**BEAM, "logits_processor": [mine]}),
    "property of a criterion": (Asked, lambda mine: {**SAMPLE, "stopping_criteria": [mine]}),
    "list that cannot be iterated": (Raises, _fails_to_iterate),
    "processor of a config": (Processor, _config),
    "criterion of a list": (Criterion, lambda mine: {**BEAM, "stopping_criteria": StoppingCriteriaList([mine])}),
    "end of a streamer": (EndsBadly, lambda mine: {"streamer": mine}),
    "mock of a streamer": (Raises, _mock_streamer),
    "partial of a function": (Raises, lambda mine: {**BEAM, "logits_processor": [partial(_hit, mine)]}),
    "prefix of a processor": (Raises, lambda mine: {**BEAM, "logits_processor": [_prefix(mine)]}),
}


@loops
@pytest.mark.parametrize("name", OBJECTS, **named)
def test_objects(name: str, loop: str) -> None:
    kind, make = OBJECTS[name]
    mine = kind(MyError("mine"))
    with loop_of(loop):
        assert_passed_on(BART, make(mine), mine)


def test_error_that_became_another() -> None:
    """Code in between, such as a context manager of the user's model, raises another error because of it."""
    mine = Raises(MyError("mine"))

    def processor(tokens: Any, scores: Any) -> Any:
        try:
            return mine.hit(scores)
        except MyError as error:
            raise ValueError("other") from error

    with pytest.raises(ValueError, match="other"):
        run(LLAMA.build(), LLAMA.make_inputs(), {**BEAM, "logits_processor": [processor]})
    assert mine.calls == AT and fallbacks() == {}


def test_error_that_the_user_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later failure of FastGen in the call is repeated like any other."""

    class Catches(LogitsProcessor):
        def __init__(self) -> None:
            self.inner = Processor(MyError("mine"))

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            with contextlib.suppress(MyError):
                self.inner(input_ids, scores)
            return scores

    with fastgen.disabled():
        original = run(LLAMA.build(), LLAMA.make_inputs(), BEAM)
    break_(monkeypatch, GrowingKV, "extend", 13)
    with pytest.warns(RuntimeWarning, match="planted"):
        ours = run(LLAMA.build(), LLAMA.make_inputs(), lambda: {**BEAM, "logits_processor": [Catches()]})
    assert_same(original, ours)


@loops
def test_a_call_with_users_code_leaves_no_cycle(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has made is freed as soon as nobody refers to it, without a garbage collection.

    The library asks criteria for attributes that they may lack.
    """

    class Lacks(Never):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            assert not hasattr(self, "missing")
            return super().__call__(input_ids, scores)

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            assert not hasattr(processors[0], "missing")  # FastGen's wrapper of it
            return scores

    processors: list[Any] = []
    wrap = user_code.wrap
    monkeypatch.setattr(
        user_code, "wrap", lambda given, errors: (wrap(given, errors), processors.extend(given["logits_processor"]))[0]
    )
    with loop_of(loop):
        gc.collect()
        gc.disable()
        try:
            options = {**BEAM, "return_dict_in_generate": True, "stopping_criteria": [Lacks()]}
            result = run(LLAMA.build(), LLAMA.make_inputs(), {**options, "logits_processor": [Asks()]})
            processors.clear()
            keys = weakref.ref(releases.cache_in(result).layers[0].keys)
            assert accelerated() and keys() is not None
            del result
            assert keys() is None
        finally:
            gc.enable()


@loops
def test_a_criterion_can_say_that_nobody_looks_at_the_cache(loop: str) -> None:
    class Releases(Never):
        releases_cache = True

    options = {**BEAM, "return_dict_in_generate": True, "output_scores": True}
    with loop_of(loop):
        for family in (BART, LLAMA):
            original = run(family.build(), family.make_inputs(), options)
            result = run(family.build(), family.make_inputs(), {**options, "stopping_criteria": [Releases()]})
            assert releases.cache_in(original).get_seq_length() and not releases.cache_in(result).get_seq_length()
            result[releases.cache_name()] = releases.cache_in(original)
            assert_same(original, result)
    assert accelerated() == 4


@loops
def test_a_criterion_that_passes_attributes_on(loop: str) -> None:
    """It has any attribute, as a `Mock` does, without a meaning."""

    class Stops(StoppingCriteria):
        def __getattr__(self, name: str) -> Any:
            if name == "eos_token_id":  # which makes the library pad
                raise AttributeError(name)
            return Mock()

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full(input_ids.shape[:1], bool(input_ids.shape[1] >= 12), dtype=torch.bool)

    options = {**BEAM, "return_dict_in_generate": True, "max_new_tokens": 40, "eos_token_id": None}
    with loop_of(loop):
        check(LLAMA.build(), LLAMA.make_inputs(), {**options, "stopping_criteria": [Stops()]})
    assert accelerated() == 1


@pytest.mark.parametrize("error", [MyError("mine"), KeyboardInterrupt("mine")], ids=repr)
def test_cache_after_users_exception(error: BaseException) -> None:
    """The user's cache holds the library's own layers, whatever ended the call, and the model goes on working."""
    cache = DynamicCache()
    options = {**BEAM, **releases.with_cache(cache), "stopping_criteria": [Criterion(error)]}
    with pytest.raises(type(error)):
        run(LLAMA.build(), LLAMA.make_inputs(), lambda: options)
    assert not [layer for layer in cache.layers if isinstance(layer, SharedLayer)]
    check(LLAMA.build(), LLAMA.make_inputs(), BEAM)
    assert accelerated() == 1


# ---- the user's code does not see its wrappers


@loops
def test_processors_of_a_config_see_all_rows(loop: str) -> None:
    """Finished inputs stay in the batch if the user's code looks at it, wherever that code comes from."""

    class Favours(LogitsProcessor):
        """Its scores depend on all rows."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores + 3.0 * torch.nn.functional.one_hot(scores.argmax().remainder(VOCABULARY), scores.shape[1])

    with loop_of(loop):
        check(LLAMA.build(), LLAMA.make_inputs(batch=4), lambda: _config(Favours(), max_new_tokens=24))
    assert accelerated() == 1


@loops
@pytest.mark.parametrize("given", ["one of the library's", "one derived from it"])
def test_merging_goes_by_type(given: str, loop: str) -> None:
    """A processor of the user's replaces the library's of the same class that the options ask for."""

    class Derived(MinLengthLogitsProcessor):
        pass

    kind = MinLengthLogitsProcessor if given == "one of the library's" else Derived

    def options() -> dict[str, Any]:
        return {**BEAM, "min_length": 30, "logits_processor": [kind(25, [EOS])], "max_new_tokens": 20}

    with loop_of(loop):
        check(LLAMA.build(), LLAMA.make_inputs(), options)


@loops
def test_what_the_library_asks_of_a_processor(loop: str) -> None:
    """Its class, signature and attributes, and whether it is the object that was passed."""

    class Wants(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any, more: Any) -> Any:
            return scores

    def call() -> str:
        with pytest.raises(ValueError) as raised:
            run(LLAMA.build(), LLAMA.make_inputs(), {**BEAM, "logits_processor": [Wants()]})
        return str(raised.value)

    with loop_of(loop):
        near_ties.check(call)
    assert fallbacks() == {}


@loops
def test_the_user_gets_themselves(loop: str) -> None:
    """`self` is the object that was passed. The library takes an object that is passed twice once."""
    seen: list[Any] = []

    class Mine(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            seen.append(self)
            return scores

    def call() -> Any:
        mine = Mine()
        result = run(LLAMA.build(), LLAMA.make_inputs(), {**BEAM, "logits_processor": [mine, mine]})
        assert all(one is mine for one in seen)
        times = len(seen)
        seen.clear()
        return result, times

    with loop_of(loop):
        near_ties.check(call)


def test_hooks_of_all_modules() -> None:
    """A forward hook for every module of the process sees the rows of the model, too."""
    calls: list[Any] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: calls.append(1))
    try:
        check(LLAMA.build(), LLAMA.make_inputs(), BEAM)
    finally:
        hook.remove()
    assert calls and list(fallbacks()) == ["forward hooks are registered on the model"]


@loops
def test_a_cache_of_the_users_that_its_code_writes_to(loop: str) -> None:
    class Scales(LogitsProcessor):
        def __init__(self, cache: Any) -> None:
            self.cache, self.seen = cache, []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            layer = self.cache.layers[0]
            self.seen.append((tuple(layer.keys.shape), self.cache.get_seq_length()))
            if len(self.seen) in (2, 5):
                layer.keys, layer.values = layer.keys * -3.0, layer.values.flip(1)
            return scores

    model, inputs = LLAMA.build(), LLAMA.make_inputs()

    def call() -> Any:
        cache = DynamicCache(config=model.config)
        processor = Scales(cache)
        result = model.generate(**inputs, logits_processor=[processor], **releases.with_cache(cache))
        return result, processor.seen, cache.layers[1].keys.shape

    with loop_of(loop):
        near_ties.check(call)
