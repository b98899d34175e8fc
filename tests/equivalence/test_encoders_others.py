"""Models that only encode: code of the user's in them, and calls that only look as if padding could be left out."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

import fastgen
from tests.equivalence.encoder_models import Head, build, inputs
from tests.equivalence.test_encoders import LENGTHS, _accelerated, _check, _fast, _plain, _reasons, _with

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def classifier() -> Any:
    return build("Bert", "SequenceClassification")


class _Counting(Head):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.states(input_ids, attention_mask) > 0).float().sum(dim=1)


class _Choosing(Head):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.states(input_ids, attention_mask).argmax(dim=-1)


class _Averaging(Head):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.states(input_ids, attention_mask).mean(dim=1)


class _Hiding(Head):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.clone()
        mask[:, 1:3] = 0
        return self.states(input_ids, mask)[:, 0]


class _Twice(Head):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        whole = self.states(input_ids, torch.ones_like(attention_mask))[:, 0]
        return whole - self.states(input_ids, attention_mask)[:, 0]


@dataclasses.dataclass
class _Fields:
    states: Any


class _Pair(NamedTuple):
    states: Any


# What a head may put its states in; of the last ones, nobody looks for them inside.
_CHANGED: dict[str, Callable[[Any], Any]] = {
    "a named tuple": _Pair,
    "a list in a dict": lambda states: {"states": (states,), "all": [states, None, 1]},
}
_UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "a UserDict": lambda states: UserDict(states=states),
    "fields": _Fields,
    "attributes": lambda states: SimpleNamespace(states=(states,)),
    "a read-only mapping": lambda states: MappingProxyType({"states": states}),
    "a set": lambda states: {states},
    "an array": lambda states: states.numpy(),
}


class _Wrapping(Head):
    container: Any

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        # A product with NaN: what is in the place of padding is no longer what the layers gave.
        return self.container(2 * self.states(input_ids, attention_mask))


def _states_in(result: Any) -> Tensor:
    if isinstance(result, (Mapping, UserDict)):
        found = result["states"]
    elif isinstance(result, set):
        found = next(iter(result))
    else:
        found = torch.as_tensor(result) if hasattr(result, "shape") else result.states
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", [*_CHANGED, *_UNKNOWN])
def test_states_in_containers_of_the_users(name: str) -> None:
    """They are found wherever they are; where they are not, the call is left to the original code."""
    model = _with_head(_Wrapping)
    model.container = {**_CHANGED, **_UNKNOWN}[name]
    given = inputs(LENGTHS)
    expected, mask = _states_in(_plain(model, given)), given["attention_mask"].bool()
    for _ in range(2):
        found = _states_in(_fast(model, given, "zero"))
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)
        assert not bool(found.isnan().any())
        assert _accelerated() == (name in _CHANGED), _reasons()


def _with_head(kind: type[Head]) -> Any:
    model = kind(build("Bert").config).eval()
    model.bert.load_state_dict(build("Bert").state_dict())
    return model


@pytest.mark.parametrize(
    ("kind", "paddings"), [(_Counting, ["exact"]), (_Choosing, ["exact"]), (_Averaging, ["exact", "zero"])]
)
def test_heads_of_the_users_that_read_padding(kind: type[Head], paddings: list[str]) -> None:
    """An average shows the NaN of padding, and a comparison hides it."""
    for padding in paddings:
        _check(_with_head(kind), inputs(LENGTHS), padding)
        assert not _accelerated()


@pytest.mark.parametrize("kind", [_Hiding, _Twice])
def test_layers_that_get_another_mask_than_the_model(kind: type[Head]) -> None:
    _check(_with_head(kind), inputs(LENGTHS), "zero")
    assert not _accelerated() and _reasons() == ["the layers get another mask than the model"]


class _Neighbours(torch.nn.Module):
    def __init__(self, dense: torch.nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, states: Tensor) -> Tensor:
        return self.dense(states) + states.roll(1, dims=1)[..., :32]


@pytest.mark.parametrize("way", ["a module", "a method", "a compiled layer"])
def test_layers_that_are_not_the_librarys(way: str) -> None:
    model = copy.deepcopy(build("Bert", "SequenceClassification"))
    output = model.bert.encoder.layer[0].output
    if way == "a module":
        output.dense = _Neighbours(output.dense).eval()
    elif way == "a method":
        output.dense.forward = _Neighbours(copy.copy(output.dense)).forward
    else:
        model.bert.encoder.layer[0].compile(backend="eager")
    for padding in ("exact", "zero"):
        _check(model, inputs(LENGTHS), padding)
        assert not _accelerated()
        assert ("is compiled" if way == "a compiled layer" else "not the library's") in _reasons()[0]


def test_gradients_of_embeddings_alone(classifier: Any) -> None:
    model = copy.deepcopy(classifier).requires_grad_(False)
    given = _with("embeddings")
    given["inputs_embeds"].requires_grad_()
    assert model(**given).logits.requires_grad and not _accelerated()


def test_a_model_that_is_traced(classifier: Any) -> None:
    """What is traced serves texts of other lengths."""
    given, others = inputs(LENGTHS), inputs([3, 40, 9, 9, 2, 30, 11])

    def trace() -> Any:
        return torch.jit.trace(classifier, tuple(given.values()), strict=False, check_trace=False)

    with torch.no_grad():
        try:
            with fastgen.disabled():
                trace()
        except IndexError as error:
            pytest.skip(f"this release cannot be traced: {error}")
        traced = trace()
        assert not _accelerated()
        torch.testing.assert_close(traced(*others.values())["logits"], _plain(classifier, others).logits)


def test_feed_forward_layers_in_chunks() -> None:
    config = copy.deepcopy(build("Bert", "SequenceClassification").config)
    config.chunk_size_feed_forward = 4
    _check(transformers.BertForSequenceClassification(config).eval(), inputs(LENGTHS))
    assert not _accelerated() and "chunks" in _reasons()[0]


@pytest.mark.parametrize("architecture", ["Bert", "DebertaV2", "ModernBert"])
def test_one_batch_says_nothing_of_others(architecture: str) -> None:
    """Lengths that are not worth groups, and results that are NaN anyway, do not keep later batches back."""
    model = copy.deepcopy(build(architecture, "SequenceClassification"))
    spoilt = copy.deepcopy(model)
    next(p for p in spoilt.parameters() if p.dim() == 2).data[7] = torch.nan
    batches = [[40, 33, 36, 35, 33], [5, 5], [9], LENGTHS]
    for lengths in batches:
        _check(model, inputs(lengths, longest=40))
        assert _accelerated() == 1, (lengths, _reasons())
    given = inputs(LENGTHS)
    given["input_ids"][0, 1] = 7
    assert _fast(spoilt, given).logits[0].isnan().any() and not _accelerated()
    given["input_ids"] = torch.where(given["input_ids"] == 7, 8, given["input_ids"])
    _check(spoilt, given)
    assert _accelerated() == 1, _reasons()
