"""all-MiniLM-L6-v2, a trained encoder: its vectors, and what they find, are those of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import fastgen
from benchmarks import minilm
from fastgen import settings
from fastgen.decoding import derived_weights
from fastgen.ops.linear import choose
from fastgen_cli.encode import embed

TOLERANCE = 1e-5
DATA = Path(__file__).parents[1] / "examples/data"


def _cut(name: str, shortest: int, longest: int, count: int) -> list[str]:
    """The first texts of a file, cut to numbers of words from shortest to longest, in no order."""
    texts = (DATA / f"heldout.{name}.txt").read_text().splitlines()[:count]
    lengths = [shortest + 7 * number % (longest - shortest + 1) for number in range(count)]
    return [" ".join(text.split()[:length]) for text, length in zip(texts, lengths, strict=True)]


MIXED = _cut("src", 2, 80, count=24)
# Short ones, because there are many.
PAIRS = {name: _cut(name, 6, 24, count=100) for name in ("src", "ref")}


@pytest.fixture(scope="session")
def folder(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if device.type != "cpu":
        pytest.skip("encoders are accelerated on a CPU")
    found = minilm.unpacked(tmp_path_factory.mktemp("minilm"))
    return found or pytest.skip(minilm.MISSING)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder).eval()


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    fastgen.enable(strict=True)
    fastgen.reset_stats()
    yield
    fastgen.enable(padding="exact")
    derived_weights.drop_all()


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reason = choose.unavailable("int8")
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    with settings.changed(weight_dtype="int8", packed_weights="keep"):
        yield


def _accelerated() -> int:
    counts = [entry["accelerated"] for name, entry in fastgen.stats().items() if name.startswith("transformers.enc")]
    return sum(counts)


def _both(run: Callable[[], Any]) -> tuple[Any, Any]:
    with fastgen.disabled():
        expected = run()
    assert not _accelerated()
    found = run()
    assert _accelerated(), fastgen.stats()
    return found, expected


def _states(model: Any, folder: Path, side: str) -> tuple[Callable[[], Any], Tensor]:
    """A pass of the model on texts of many lengths, and where their tokens are."""
    batch = AutoTokenizer.from_pretrained(folder, padding_side=side)(MIXED, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    assert 0.2 < float(mask.float().mean()) < 0.8

    def run() -> Any:
        with torch.inference_mode():
            return model(**batch)

    return run, mask


def _means(states: Tensor, mask: Tensor) -> Tensor:
    """Pooled as the model's files say: the normalised mean over tokens."""
    return torch.nn.functional.normalize((states * mask.unsqueeze(2)).sum(dim=1) / mask.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("side", ["right", "left"])
def test_vectors_of_tokens_and_texts(model: Any, folder: Path, side: str) -> None:
    fastgen.enable(padding="zero")
    if side == "left":
        model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()  # it reads the first position
    run, mask = _states(model, folder, side)
    found, expected = _both(run)
    states, others = found.last_hidden_state, expected.last_hidden_state
    torch.testing.assert_close(states[mask], others[mask], rtol=0.0, atol=TOLERANCE)
    assert not states[~mask].any()
    torch.testing.assert_close(_means(states, mask), _means(others, mask), rtol=0.0, atol=TOLERANCE)
    if side == "right":
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=0.0, atol=TOLERANCE)


def _sentences(folder: Path, side: str = "right") -> Any:
    library = pytest.importorskip("sentence_transformers", minversion="6")
    found = library.SentenceTransformer(str(folder), device="cpu")
    found.tokenizer.padding_side = side
    return found


@pytest.fixture(scope="module")
def pairs(folder: Path) -> list[Any]:
    """Vectors of the sources and of the references, by sentence-transformers alone."""
    sentences = _sentences(folder)
    with fastgen.disabled():
        return [sentences.encode(texts, batch_size=32, show_progress_bar=False) for texts in PAIRS.values()]


def _embedded(folder: Path, target: Path) -> list[Any]:
    """The same by `fastgen-embed`."""
    found = []
    for name, texts in PAIRS.items():
        file, out = target / f"{name}.txt", target / f"{name}.npy"
        file.write_text("\n".join(texts) + "\n")
        assert embed([str(word) for word in (folder, file, out, "--device", "cpu", "--quiet")]) == 0
        found.append(np.load(out))
    return found


def _nearest(sources: Any, references: Any) -> Any:
    """The reference that is closest to each source by the cosine. Vectors have length 1."""
    return (sources @ references.T).argmax(axis=1)


def test_the_command_finds_the_same_references(folder: Path, pairs: list[Any], tmp_path: Path) -> None:
    found = _embedded(folder, tmp_path)
    assert _accelerated()
    for one, other in zip(found, pairs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.0, atol=TOLERANCE)
    assert _nearest(*found).tolist() == _nearest(*pairs).tolist()


def test_int8_finds_nearly_the_same_references(folder: Path, pairs: list[Any], tmp_path: Path, int8: None) -> None:
    found = _embedded(folder, tmp_path)
    assert _accelerated() and not np.allclose(found[0], pairs[0], atol=1e-4)
    assert (_nearest(*found) == _nearest(*pairs)).mean() >= 0.98
