"""Pipelines of Transformers on batches of different lengths: what they say with FastGen is what they say without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import pipeline

import fastgen
from tests.equivalence.encoder_models import build, texts, tokenizer
from tests.equivalence.test_encoders import TOLERANCE, _accelerated, _reasons

# One of each way: one row, groups, and groups with padding behind the texts.
ARCHITECTURES = ["Bert", "DistilBert", "DebertaV2", "ModernBert"]
BATCH = 4
LENGTHS = [1, 30, 7, 12, 3, 3, 25, 38, 5, 18]
BATCHES = -(-len(LENGTHS) // BATCH)
READS_PADDING = "padded positions are in the results, or what these depend on"


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    fastgen.enable(strict=True)
    yield
    fastgen.enable(padding="exact")


def _both(task: str, head: str, architecture: str, side: str, padding: str, **options: Any) -> tuple[Any, Any]:
    """What the pipeline says with FastGen, whose calls are counted, and without."""
    run = pipeline(task, model=build(architecture, head), tokenizer=tokenizer(side), device="cpu")
    given = texts(LENGTHS, masked=task == "fill-mask")
    with fastgen.disabled():
        expected = run(given, batch_size=BATCH, **options)
    fastgen.enable(padding=padding)
    fastgen.reset_stats()
    return run(given, batch_size=BATCH, **options), expected


def _assert_same(found: Any, expected: Any) -> None:
    """Words, labels and places are equal, and numbers close."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, str | int):
        assert found == expected
    else:
        assert float(found) == pytest.approx(float(expected), abs=TOLERANCE)


def _assert_counted(reason: str | None) -> None:
    """That each batch is accelerated, or says why not."""
    assert _accelerated() == (BATCHES if reason is None else 0), _reasons()
    assert _reasons() == ([] if reason is None else [reason])


def _reason(task: str, architecture: str, side: str, padding: str) -> str | None:
    """Why the library's own code runs; None if padding is left out."""
    if side == "left" and architecture == "ModernBert":
        return "padding in front of the tokens"
    if padding == "exact" and task != "text-classification":
        return READS_PADDING
    if side == "right":
        return None
    # The first position stands for the text there, and it is padding.
    reads_first = task == "text-classification" or (task == "feature-extraction" and architecture == "Bert")
    return READS_PADDING if reads_first else None


@pytest.mark.parametrize("padding", ["exact", "zero"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("task", "head", "options"),
    [
        ("text-classification", "SequenceClassification", {"top_k": None}),
        ("token-classification", "TokenClassification", {}),
        ("fill-mask", "MaskedLM", {"top_k": 3}),
    ],
)
def test_labels_and_words(
    task: str, head: str, options: dict[str, Any], architecture: str, side: str, padding: str
) -> None:
    _assert_same(*_both(task, head, architecture, side, padding, **options))
    _assert_counted(_reason(task, architecture, side, padding))


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_words_of_several_tokens(strategy: str) -> None:
    _assert_same(
        *_both("token-classification", "TokenClassification", "Bert", "right", "zero", aggregation_strategy=strategy)
    )
    _assert_counted(None)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_features(architecture: str, side: str) -> None:
    """The pipeline gives the positions of padding, too: those of the library, or zeros."""
    found, expected = _both("feature-extraction", "", architecture, side, "exact")
    _assert_same(found, expected)
    _assert_counted(READS_PADDING)
    found, expected = _both("feature-extraction", "", architecture, side, "zero")
    _assert_counted(_reason("feature-extraction", architecture, side, "zero"))
    for length, one, other in zip(LENGTHS, found, expected, strict=True):
        one, other = torch.tensor(one[0]), torch.tensor(other[0])
        assert one.shape == other.shape
        tokens = length + 2
        kept = slice(tokens) if side == "right" else slice(len(other) - tokens, None)
        torch.testing.assert_close(one[kept], other[kept], rtol=TOLERANCE, atol=TOLERANCE)
        if _accelerated():
            assert int(one.any(dim=1).sum()) == tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers(architecture: str) -> None:
    """The best answer to each question: later releases have no pipeline for it."""
    model, contexts = build(architecture, "QuestionAnswering"), texts(LENGTHS)
    given = tokenizer()(["w7 w8 w9"] * len(contexts), contexts, padding=True, return_tensors="pt")
    is_context = torch.tensor([[part == 1 for part in given.sequence_ids(n)] for n in range(len(contexts))])

    def answers() -> list[int]:
        with torch.inference_mode():
            result = model(**given)
        start, end = (
            each.masked_fill(~is_context, -torch.inf).softmax(dim=1)
            for each in (result.start_logits, result.end_logits)
        )
        return (start.unsqueeze(2) * end.unsqueeze(1)).triu().flatten(1).argmax(dim=1).tolist()

    with fastgen.disabled():
        expected = answers()
    fastgen.enable(padding="zero")
    fastgen.reset_stats()
    assert answers() == expected
    assert _accelerated() == 1, _reasons()


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of these tests fails when texts see each other."""
    from fastgen.optimizer.transformers.encoders import unpadded_forward

    def over_all(self: Any, query: Any, keys: Any, values: Any, scale: float) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale).transpose(1, 2)

    monkeypatch.setattr(unpadded_forward.Packing, "attend", over_all)
    found, expected = _both("text-classification", "SequenceClassification", "Bert", "right", "exact", top_k=None)
    with pytest.raises(AssertionError):
        _assert_same(found, expected)
