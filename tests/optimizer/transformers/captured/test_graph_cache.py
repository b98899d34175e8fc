"""What is kept of models, when several threads look at it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fastgen.optimizer.transformers.captured import graph_cache

Act = Callable[[Any], object]


def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))


def step(key: Any) -> Any:
    return SimpleNamespace(key=key, nbytes=1, device=torch.device("cpu"), state=None, clear=lambda: None)


class Watched(OrderedDict[Any, Any]):
    """Steps of a model; whoever goes through them lets another thread run meanwhile."""

    meanwhile: Callable[[], None]

    def __iter__(self) -> Any:
        self.meanwhile()
        return super().__iter__()

    def __bool__(self) -> bool:
        self.meanwhile()
        return len(self) > 0


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Any:
    graph_cache.drop_all()
    yield
    graph_cache.drop_all()


@pytest.mark.parametrize(
    "other",
    [
        lambda model: graph_cache.take(model, "new", lambda: step("new")),
        lambda model: graph_cache.refuse(model, "new", "too large"),
        lambda model: graph_cache.drop_all(),
    ],
    ids=["takes", "refuses", "drops"],
)
@pytest.mark.parametrize("one", ["gives back", "drops"])
def test_another_thread_changes_nothing_while_one_goes_through(one: str, other: Act) -> None:
    first, second, third = model(), model(), model()
    for each in (first, second):
        made = graph_cache.take(each, "old", lambda: step("old"))
        graph_cache.give_back(each, made)
    taken = graph_cache.take(second, "other", lambda: step("other"))
    thread = threading.Thread(target=other, args=(third,))

    def meanwhile() -> None:
        if thread.ident is None:
            thread.start()
            thread.join(timeout=0.5)  # it ends, or waits

    for kept in graph_cache._models.values():
        kept.steps = Watched(kept.steps if one == "gives back" else ())  # whether there are any, is asked until one has
        kept.steps.meanwhile = meanwhile
    if one == "drops":
        assert not graph_cache.drop_all()
    else:
        graph_cache.give_back(second, taken)
    thread.join(timeout=60)
    assert thread.ident is not None and not thread.is_alive()
