"""Runs `generate` with the original code and with FastGen, and compares everything that comes back."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

import fastgen
from fastgen import releases, settings
from tests import near_ties
from tests.near_ties import assert_same  # noqa: F401  (for the tests)

ENTRY_POINT = "transformers.generate"


def run(
    model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]], seed: int = 0
) -> Any:
    """One call from a fixed random state, on copies of the inputs. Options that hold state come from a function."""
    torch.manual_seed(seed)
    arguments = copy.deepcopy(inputs)
    arguments.update(options() if callable(options) else copy.copy(options))
    return model.generate(**arguments)


def check(model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]]) -> Any:
    """Asserts that both results are the same, near-ties excepted, and returns that of FastGen."""
    # With a captured step on a GPU, other tokens would be drawn.
    draws_others = model.device.type != "cpu" and not callable(options) and options.get("do_sample")
    with settings.changed(captured_step="never") if draws_others else contextlib.nullcontext():
        return near_ties.check(lambda: run(model, inputs, options))


def cache_with(model: Any, tokens: torch.Tensor, cache: Any = None) -> Any:
    """A cache that the model has stored these tokens in: this one, or one of its kind."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(input_ids=tokens, **releases.with_cache(cache))
    return cache


def chat(
    model: Any, tokens: torch.Tensor, cache: Any, options: Callable[[int], dict[str, Any]], turns: int = 3
) -> list[tuple[torch.Tensor, int]]:
    """Tokens after each turn behind this cache, and how many positions are there then. A question is five tokens."""
    question, found = tokens[:, :5], []
    for turn in range(turns):
        given = options(turn) | releases.with_cache(cache)
        tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), **given)
        found.append((tokens, cache.get_seq_length()))
        tokens = torch.cat([tokens, question], dim=1)
    return found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside this block, tensors of floats that are made without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def accelerated() -> int:
    """Calls that ran accelerated since the last `fastgen.reset_stats()`."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("accelerated", 0)


def fallbacks() -> dict[str, int]:
    """Calls that fell back since then, by reason."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("fallback", {})


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Calls `work(number)` in so many threads at the same time."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
