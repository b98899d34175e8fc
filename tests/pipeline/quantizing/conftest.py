"""Tiny models and texts, and what runs have quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgen.pipeline.quantizing import run, texts
from fastgen.quantization import report
from tests.pipeline import tiny
from tests.pipeline.quantizing.runs import saved
from tests.quantization import tiny as families


@pytest.fixture(autouse=True)
def short_reports(monkeypatch):
    """Speed is measured on few tokens, and no picture is drawn: that is most of the time of a run of a tiny model."""
    monkeypatch.setattr(texts, "_SPEED", {**texts._SPEED, "max_new_tokens": 3, "min_new_tokens": 3})
    monkeypatch.setattr(report, "png", lambda values: b"")


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return saved(families.llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory) -> Path:
    """Its output layer has the weight of its embedding."""
    return saved(lambda **sizes: families.llama(tie_word_embeddings=True, **sizes), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory) -> Path:
    return saved(families.gpt2, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(tiny.sentences(30)) + "\n")
    return path


@pytest.fixture
def pairs(tmp_path) -> Path:
    path = tmp_path / "pairs.txt"
    made = zip(tiny.sentences(8), tiny.sentences(8, seed=1), strict=True)
    path.write_text("".join(f"{source}\t{target}\n" for source, target in made))
    return path


@pytest.fixture
def kept(monkeypatch):
    """The models that runs have quantised, with the weights that theirs stand for."""
    models, own = [], run.save

    def save(loaded, *args):
        models.append({name: tensor.clone() for name, tensor in loaded.model.state_dict().items()})
        return own(loaded, *args)

    monkeypatch.setattr(run, "save", save)
    return models
