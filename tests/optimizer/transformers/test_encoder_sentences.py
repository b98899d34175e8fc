"""Models of sentence-transformers: the same vectors, and which of them mask all that their encoder gives.

The second is told by stand-ins for its classes, also where it is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastgen
from fastgen.optimizer.transformers.encoders import sentences
from tests.equivalence.encoder_models import build, texts, tokenizer

LIBRARY = "sentence_transformers.modules"
ENTRY_POINT = "transformers.encoder"
READS_PADDING = "padded positions are in the results, or what these depend on"
POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "lasttoken", "max")]
LENGTHS = [1, 30, 7, 12, 3, 3, 25, 38, 5, 18, 1, 9]
BATCH = 6
BATCHES = 2
TOLERANCE = 1e-5


def _made(name: str, module: str = LIBRARY, **attributes: Any) -> Any:
    made = type(name, (nn.Module,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def _model(module: str = LIBRARY, side: str = "right", last: str = "Normalize", **pooling: Any) -> Any:
    model = _made("SentenceTransformer", module)
    encoder = _made("Transformer", tokenizer=SimpleNamespace(padding_side=side))
    for number, part in enumerate((encoder, _made("Pooling", **pooling), _made(last))):
        model.add_module(str(number), part)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", [{"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True}])
def test_pooling_with_a_mask(pooling: dict[str, Any], side: str) -> None:
    assert sentences._pools(_model(side=side, **pooling))


@pytest.mark.parametrize("pooling", [{"pooling_mode": ("mean", "cls")}, {"pooling_mode_cls_token": True}])
def test_the_first_column_may_be_padding(pooling: dict[str, Any]) -> None:
    assert sentences._pools(_model(**pooling))
    assert not sentences._pools(_model(side="left", **pooling))


@pytest.mark.parametrize("changed", [{"module": "users"}, {"last": "Attention"}])
def test_code_of_others_may_read_padding(changed: dict[str, str]) -> None:
    assert not sentences._pools(_model(**changed))


@pytest.mark.parametrize("name", ["encode", "of_the_users", "forward", "_encode_batch"])
def test_a_class_of_the_users(name: str) -> None:
    """It may override `encode`, and have other methods, but nothing that the library's `encode` calls."""
    model = _model()
    kind = type(model)
    kind.forward = kind._encode_batch = kind.encode = lambda self: None
    own = {name: lambda self: None, "__init__": lambda self: None, "__annotations__": {"of_the_users": int}}
    model.__class__ = type("Mine", (kind,), own)
    assert sentences._pools(model) == (name in ("encode", "of_the_users"))


@pytest.mark.parametrize("number", [None, 0, 1, 2])
def test_a_forward_pass_of_the_users(number: int | None) -> None:
    """Which a constructor or an `encode` of theirs may have set."""
    model = _model()
    changed = model if number is None else list(model.children())[number]
    changed.forward = changed.forward  # type: ignore[method-assign]
    assert sentences._pools(model)
    changed.forward = lambda features: features  # type: ignore[method-assign,assignment]
    assert not sentences._pools(model)


@pytest.fixture
def library() -> Iterator[Any]:
    """The package, whose calls are accelerated or raise."""
    found = pytest.importorskip("sentence_transformers", minversion="6")
    fastgen.enable(strict=True)
    fastgen.reset_stats()
    yield found
    fastgen.enable(padding="exact")


def _folder(path: Any, architecture: str, head: str = "", side: str = "right") -> str:
    build(architecture, head).save_pretrained(path)
    tokenizer(side).save_pretrained(path)
    return str(path)


def _vectors(library: Any, folder: str, pooling: Any = "mean", include_prompt: bool = True, **more: Any) -> Any:
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    modules = [Transformer(folder), Pooling(32, pooling_mode=pooling, include_prompt=include_prompt), Normalize()]
    return library.SentenceTransformer(modules=modules, device="cpu", prompts={"query": "w11 w12"}, **more)


def _both(model: Any, given: Any, method: str = "encode", **options: Any) -> tuple[Any, Any]:
    """What the model gives with FastGen, whose calls are counted, and without."""
    run = getattr(model, method)
    with fastgen.disabled():
        expected = run(given, batch_size=BATCH, **options)
    fastgen.reset_stats()
    return run(given, batch_size=BATCH, **options), expected


def _assert_close(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) and len(found) == len(expected)
    if isinstance(expected, list):
        found, expected = torch.stack(found), torch.stack(expected)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=TOLERANCE, atol=TOLERANCE)


def _counted() -> tuple[int, list[str]]:
    entries = [entry for name, entry in fastgen.stats().items() if name.startswith(ENTRY_POINT)]
    return sum(entry["accelerated"] for entry in entries), [why for each in entries for why in each.get("not used", {})]


@pytest.mark.sampled()
@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("architecture", ["Bert", "DebertaV2", "ModernBert"])
def test_vectors(library: Any, architecture: str, side: str, include_prompt: bool, tmp_path: Any) -> None:
    folder = _folder(tmp_path, architecture, side=side)
    for pooling in POOLINGS:
        model = _vectors(library, folder, pooling, include_prompt)
        _assert_close(*_both(model, texts(LENGTHS), prompt_name=None if include_prompt else "query"))
        accelerated, reasons = _counted()
        if side == "right" or (architecture != "ModernBert" and pooling != "cls"):
            assert accelerated == BATCHES, reasons
        else:
            expected = READS_PADDING if pooling == "cls" else "padding in front of the tokens"
            assert accelerated == 0 and reasons == [expected]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "encode_query"},
        {"method": "encode_document"},
        {"normalize_embeddings": True},
        {"convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"truncate_dim": 8},
        {"prompt": "w20 w21"},
        {"precision": "float32"},
    ],
    ids=str,
)
def test_options(library: Any, options: dict[str, Any], tmp_path: Any) -> None:
    _assert_close(*_both(_vectors(library, _folder(tmp_path, "Bert")), texts(LENGTHS), **options))
    assert _counted() == (BATCHES, [])


def test_the_order_is_that_of_the_texts(library: Any, tmp_path: Any) -> None:
    """The library sorts them by length; and vectors do not depend on the batch."""
    model = _vectors(library, _folder(tmp_path, "Bert"))
    given = texts(LENGTHS)
    alone = np.stack([model.encode(text) for text in given])
    for some in (given, given[::-1]):
        found = model.encode(some, batch_size=BATCH)
        _assert_close(found, alone if some is given else alone[::-1])
    assert len(model.encode([])) == 0


def test_a_saved_model(library: Any, tmp_path: Any) -> None:
    _vectors(library, _folder(tmp_path / "parts", "Bert"), "max").save(str(tmp_path / "whole"))
    _assert_close(*_both(library.SentenceTransformer(str(tmp_path / "whole"), device="cpu"), texts(LENGTHS)))
    assert _counted() == (BATCHES, [])


def test_a_subclass_with_an_encode_of_its_own(library: Any, tmp_path: Any) -> None:
    class Mine(library.SentenceTransformer):
        def encode(self, given: Any, **options: Any) -> Any:
            return 2 * super().encode(given, **options)

    model = _vectors(library, _folder(tmp_path, "Bert"))
    mine = Mine(modules=list(model.children()), device="cpu")
    _assert_close(*_both(mine, texts(LENGTHS)))
    assert _counted() == (BATCHES, [])


def test_a_subclass_that_reads_padding(library: Any, tmp_path: Any) -> None:
    class Mine(library.SentenceTransformer):
        def __init__(self, *parts: Any, **options: Any) -> None:
            super().__init__(*parts, **options)
            self.forward = self.mean_with_padding

        def mean_with_padding(self, features: Any, **options: Any) -> Any:
            found = self[0](features)
            return {**found, "sentence_embedding": found["token_embeddings"].mean(1)}

    model = _vectors(library, _folder(tmp_path, "Bert"))
    _assert_close(*_both(Mine(modules=list(model.children()), device="cpu"), texts(LENGTHS)))
    assert _counted() == (0, [READS_PADDING])


def test_states_of_tokens(library: Any, tmp_path: Any) -> None:
    """They are shown: those of the library, or with padding="zero" the same at real tokens."""
    model = _vectors(library, _folder(tmp_path, "Bert"))
    found, expected = _both(model, texts(LENGTHS), output_value="token_embeddings")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert _counted() == (0, [READS_PADDING])
    fastgen.enable(padding="zero")
    found, expected = _both(model, texts(LENGTHS), output_value="token_embeddings")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    assert _counted() == (BATCHES, [])


def test_a_module_that_reads_padding(library: Any, tmp_path: Any) -> None:
    class Averaging(nn.Module):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return {**features, "sentence_embedding": features["token_embeddings"].mean(dim=1)}

    model = _vectors(library, _folder(tmp_path, "Bert"))
    model[1] = Averaging()
    found, expected = _both(model, texts(LENGTHS))
    assert np.array_equal(found, expected) and _counted() == (0, [READS_PADDING])


def test_pairs_of_texts(library: Any, tmp_path: Any) -> None:
    """Cross-encoders give numbers, and have no states to show."""
    model = library.CrossEncoder(_folder(tmp_path, "Bert", "SequenceClassification"), device="cpu")
    given = texts(LENGTHS)
    _assert_close(*_both(model, list(zip(given[::-1], given, strict=True)), "predict"))
    assert _counted()[0] == BATCHES


def _sparse(library: Any, folder: str, strategy: str) -> Any:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    modules = [Transformer(folder, transformer_task="fill-mask"), SpladePooling(pooling_strategy=strategy)]
    return library.SparseEncoder(modules=modules, device="cpu")


@pytest.mark.parametrize("padding", ["exact", "zero"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_sparse_vectors(library: Any, strategy: str, padding: str, tmp_path: Any) -> None:
    """The scores of padded positions are multiplied by 0, which NaN outlives."""
    fastgen.enable(padding=padding)
    model = _sparse(library, _folder(tmp_path, "Bert", "MaskedLM"), strategy)
    found, expected = _both(model, texts(LENGTHS), convert_to_sparse_tensor=False)
    _assert_close(found, expected)
    assert bool(torch.as_tensor(expected).any())
    assert _counted() == ((BATCHES, []) if padding == "zero" else (0, [READS_PADDING]))


@pytest.mark.parametrize("padding", ["exact", "zero"])
def test_a_call_of_the_modules(library: Any, padding: str, tmp_path: Any) -> None:
    """Without `encode`: what the tokenizer gives is no dict."""
    fastgen.enable(padding=padding)
    model = _vectors(library, _folder(tmp_path, "Bert"))
    features = model.preprocess(texts(LENGTHS))
    assert not isinstance(features, dict)
    with fastgen.disabled(), torch.no_grad():
        expected = model(copy.copy(features))
    with torch.no_grad():
        found = model(features)
    assert found is features
    torch.testing.assert_close(found["sentence_embedding"], expected["sentence_embedding"], rtol=1e-5, atol=1e-5)
    is_token = features["attention_mask"].bool()
    states = found["token_embeddings"]
    torch.testing.assert_close(states[is_token], expected["token_embeddings"][is_token], rtol=1e-5, atol=1e-5)
    assert padding == "exact" or not bool(states[~is_token].any())
    assert _counted() == ((1, []) if padding == "zero" else (0, [READS_PADDING]))
