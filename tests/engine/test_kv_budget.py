"""Which requests have room beside others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fastgen.engine.kv_budget import KVBudget
from fastgen.engine.options import make
from tests.engine.conftest import PROMPTS


def test_the_oldest_has_room_first(llama: Any) -> None:
    """It must not wait for room that others, which came later, take."""
    requests = [make(llama, PROMPTS[0], None, {"max_new_tokens": 8}, None, 8) for _ in range(3)]
    budget = KVBudget(None, has_encoder=False)
    prompt: Any = SimpleNamespace(bytes_per_position=(64, 0), bytes_of_states=0, sizes=SimpleNamespace(source=0))
    budget.note(prompt, requests[0])
    budget.most_bytes = 2 * budget.needed(requests[0], 8)
    assert budget.fitting(requests, requests[2], []) == [requests[2], requests[0]]
    budget.most_bytes = 1
    assert budget.fitting(requests, requests[2], []) == [requests[2]]
