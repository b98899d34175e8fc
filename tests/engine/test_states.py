"""Requests of models that keep states besides K and V, or in their place: what the budget of an engine counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen import releases
from fastgen.engine.continuous import ContinuousBatches
from fastgen.optimizer.transformers.cache_layers import of_layer
from tests.engine.conftest import PROMPTS, assert_as_alone, requests_for, run
from tests.equivalence.hybrids import BY_NAME

pytestmark = pytest.mark.skipif(not releases.keeps_states_in_cache(), reason="states are kept elsewhere")
# With K and V in some layers, in all of them, in none, and with latents in some.
each_kind = pytest.mark.parametrize(
    "name", [name for name in ("lfm2", "falcon-h1", "mamba2", "kimi-linear") if name in BY_NAME]
)


def _bytes_of_states(model: Any) -> int:
    """Of a row, as the library's cache has them."""
    with torch.no_grad():
        layers = releases.cache_in(model(torch.tensor(PROMPTS[:1]))).layers
    return sum(state.nbytes for layer in layers for state in of_layer(layer).values())


def _peak(model: Any, **options: Any) -> int:
    executor = ContinuousBatches(model, 4)
    run(executor, requests_for(model, PROMPTS[:1], num_beams=options.pop("rows", 1), eos_token_id=None, **options))
    found: int = executor.stats()["kv_bytes"]
    return found


@each_kind
def test_states_count_once_for_each_row(name: str) -> None:
    """Beside the K and V of positions, of which a request stores all but the last two of its new tokens at its peak."""
    model = BY_NAME[name].build()
    states, prompt = _bytes_of_states(model), len(PROMPTS[0])
    position = (_peak(model, max_new_tokens=9) - _peak(model, max_new_tokens=4)) // 5
    assert bool(position) is (name != "mamba2")
    assert _peak(model, max_new_tokens=4) == (prompt + 2) * position + states
    assert _peak(model, max_new_tokens=4, rows=3) == (prompt + 3 * 2) * position + 3 * states


@each_kind
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_a_budget_of_memory(name: str, options: dict[str, Any]) -> None:
    """Some wait or begin again, with the states of their own, and no more is stored than may be."""
    model, made = BY_NAME[name].build(), {"max_new_tokens": 24, "eos_token_id": None, **options}
    probe = ContinuousBatches(model, 32)
    run(probe, requests_for(model, PROMPTS, **made), at_once=8)
    peak = probe.stats()["kv_bytes"]
    executor, requests = ContinuousBatches(model, 32, cache_bytes=peak // 2), requests_for(model, PROMPTS, **made)
    run(executor, requests, at_once=8)
    assert_as_alone(model, requests, PROMPTS)
    assert 0 < executor.stats()["kv_bytes"] <= peak // 2
    assert executor.counts["busy_row_steps"] > executor.counts["steps"], "some were there together"


def test_one_whose_states_are_more_than_the_budget() -> None:
    model = BY_NAME["mamba2"].build()
    executor = ContinuousBatches(model, 8, cache_bytes=_bytes_of_states(model) * 2)
    small, large = (requests_for(model, PROMPTS[:1], max_new_tokens=4, num_beams=beams)[0] for beams in (2, 3))
    run(executor, [small, large])
    assert_as_alone(model, [small], PROMPTS[:1])
    with pytest.raises(MemoryError, match="cache_gib"):
        large.future.result(0)
