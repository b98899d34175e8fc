"""The nearest neighbours, against a definition in plain Python, and what part of them agrees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import retrieval


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


def test_nearest_is_by_the_cosine(monkeypatch):
    monkeypatch.setattr(retrieval, "_SOURCES_AT_ONCE", 3)
    source = np.random.default_rng(0)
    sources, references = source.normal(size=(8, 4)), source.normal(size=(5, 4)) * [[1], [100], [1], [0.01], [7]]
    expected = [max(range(5), key=lambda n: cosine(row, references[n])) for row in sources.tolist()]
    assert retrieval.nearest(sources, references).tolist() == expected
    assert retrieval.nearest(sources[:0], references).tolist() == []


def test_shares(tmp_path):
    eye = np.eye(4, dtype=np.float32)
    other = eye[[0, 1, 3, 2]]
    files = [tmp_path / f"{number}.npy" for number in range(4)]
    for file, vectors in zip(files, (eye, eye, eye, other), strict=True):
        np.save(file, vectors)
    assert list(retrieval.shares(files[:2]).values()) == [1.0]
    assert list(retrieval.shares(files).values()) == [1.0, 0.5, 0.5]
    np.save(files[1], eye[:3])
    with pytest.raises(ValueError, match="a reference for each source"):
        retrieval.shares(files[:2])
