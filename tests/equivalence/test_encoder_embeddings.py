"""Embeddings are the model's own code, on all positions: the library's errors, and whatever a model makes of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from tests.equivalence.encoder_models import PAD, Head, assert_close, both, build, inputs
from tests.equivalence.test_encoders import LENGTHS

PADDING_ZERO = "transformers.encoder, padding zero"


@pytest.fixture(autouse=True)
def without_padding(strict: None) -> None:
    fastgen.enable(padding="zero")


def _check(model: Any, given: dict[str, Any]) -> None:
    mask = given["attention_mask"]
    found, expected = both(model, given)
    assert_close(found[0], expected[0], at=mask)
    assert not found[0][~mask.bool()].any()


def test_errors_are_those_of_the_library() -> None:
    """Numbers that no table has, be it at padding, and texts that are too long."""
    model, given = build("Bert"), inputs(LENGTHS)
    wrong = []
    for ids in (-1, 10_000):
        wrong.append({**given, "input_ids": given["input_ids"].masked_fill(given["attention_mask"] == 0, ids)})
    wrong.append({**given, "token_type_ids": torch.full_like(given["input_ids"], 5)})
    wrong.append({**given, "position_ids": torch.full_like(given["input_ids"], 64)})
    wrong.append(inputs([5, 20, 70], longest=70))
    wrong.append(
        {name: nn.functional.pad(value, (0, 60), value=PAD * (name == "input_ids")) for name, value in given.items()}
    )
    for each in wrong:
        with fastgen.disabled(), torch.inference_mode(), pytest.raises((IndexError, RuntimeError)) as expected:
            model(**each)
        with torch.inference_mode(), pytest.raises(expected.type) as found:
            model(**each)
        assert str(found.value) == str(expected.value)


def test_tables_of_others() -> None:
    """What looks words up in another way sees all of them."""

    class Table(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids.shape)
            return super().forward(ids)

    seen: list[Any] = []
    model, given = copy.deepcopy(build("Bert")), inputs(LENGTHS)
    former = model.embeddings.word_embeddings
    model.embeddings.word_embeddings = Table(*former.weight.shape, _weight=former.weight.detach())
    _check(model.eval(), given)
    assert seen[-1] == given["input_ids"].shape


def test_layers_that_get_other_states() -> None:
    """A model that changes the embeddings before its layers."""

    class Doubling(type(build("Bert"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            run = self.encoder.forward
            self.encoder.forward = lambda states, *more, **options: run(states * 2, *more, **options)
            try:
                return super().forward(*args, **kwargs)
            finally:
                del self.encoder.forward

    model, given = copy.deepcopy(build("Bert")), inputs(LENGTHS)
    model.__class__ = Doubling
    for accelerated in (1, 2, 3):
        found, expected = both(model, given)
        assert_close(found[0], expected[0], at=given["attention_mask"])
        assert fastgen.stats().get(PADDING_ZERO, {"accelerated": 0})["accelerated"] == accelerated


def test_a_head_that_looks_at_embeddings() -> None:
    class Looking(Head):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            seen, hook = list[Tensor](), self.bert.embeddings.forward
            self.bert.embeddings.forward = lambda **given: seen.append(hook(**given)) or seen[-1]
            try:
                states = self.states(input_ids, attention_mask)
            finally:
                del self.bert.embeddings.forward
            return states[:, 0] + seen.pop()[:, 0]

    model, given = Looking(build("Bert").config).eval(), inputs(LENGTHS)
    for _ in range(3):
        assert_close(*both(model, given))
    assert fastgen.stats()[PADDING_ZERO]["accelerated"] == 3
