"""Fixtures of the equivalence tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastgen
from fastgen.decoding import layers
from fastgen.decoding.captured import graph
from fastgen.decoding.kv import growing as kv
from fastgen.decoding.kv.view import KVView
from fastgen.optimizer.transformers import logits
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence import speculation
from tests.equivalence.captured import on_the_cpu, record_programs, spoil_shared_memory
from tests.equivalence.cases import draws_others
from tests.noting import noted


@pytest.fixture(autouse=True)
def captured(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """With `--captured`, and in test_captured*.py, decoding steps are captured.

    In a simulated graph; in test_captured*.py on a GPU in a real one.
    """
    always = request.path.name.startswith("test_captured")
    if always and device.type == "cuda":
        graph_cache.drop_all()
        yield
        return
    with on_the_cpu() if always or request.config.getoption("--captured") else contextlib.nullcontext():
        yield


@pytest.fixture(params=["graphs", "programs"])
def way(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How steps are captured: in simulated graphs, or as programs of the CPU."""
    if draws_others(request.node.callspec.params):
        pytest.skip("other samples are drawn in a graph")
    if request.param == "graphs":
        with on_the_cpu():
            yield request.param
        return
    record_programs(device, monkeypatch)
    spoil_shared_memory(monkeypatch)
    yield request.param


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each replay of a graph."""
    return noted(monkeypatch, graph.Graph, "replay")


@pytest.fixture(autouse=True)
def counted(counted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is shared however few bytes it has, every layer has a kernel of FastGen's, and no score is copied: those
    of a tiny model would never be worth it.
    """
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(kv, "MIN_TABLE_BYTES", 0)
    monkeypatch.setattr(logits, "MIN_SCORES", 0)
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)


@pytest.fixture
def speculates_at_once(counted: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are recorded in the first call, and layers of any size have low-bit drafts, in calls of any length."""
    speculation.record_at_once(monkeypatch)
    yield
    fastgen.enable(self_speculation="off", assisted_sampling="library")
    graph_cache.drop_all()


@pytest.fixture
def any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds draft different numbers of tokens, none among them, whatever that gains."""
    speculation.draft_any_lengths(monkeypatch)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Letters and pairs of letters, so that a string may end within a token and begin in any of several."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijkl"
    texts = ["<pad>", "<s>", "</s>", "<unk>", *letters, *(one + two for one in letters for two in letters)]
    made = Tokenizer(models.WordLevel({text: token for token, text in enumerate(texts)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


class SharedPrefixes:
    """How often a shared prefix was handed to a model, and how often the model made the full tensor of a long one.

    Attributes:
        made: handles made.
        full: full tensors made, with the line of code that asked for each.
    """

    def __init__(self) -> None:
        self.made = 0
        self.full: list[str] = []


@pytest.fixture
def shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> SharedPrefixes:
    """Counts uses of the shared prefix during the test."""
    found = SharedPrefixes()
    of, materialize = KVView.of, KVView.materialize

    def counting_of(*args: object, **kwargs: object) -> KVView:
        found.made += 1
        return of(*args, **kwargs)

    def counting_materialize(tensor: KVView) -> object:
        if tensor._parts.prefix.shape[2] >= kv.MIN_SHARED_PREFIX:
            found.full.append(_asked_by())
        return materialize(tensor)

    monkeypatch.setattr(KVView, "of", staticmethod(counting_of))
    monkeypatch.setattr(KVView, "materialize", counting_materialize)
    return found


def _asked_by() -> str:
    """The line of Transformers' code that is running."""
    import sys

    frame = sys._getframe()
    while frame is not None and "/transformers/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "nobody" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
