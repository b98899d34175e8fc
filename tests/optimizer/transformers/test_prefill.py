"""What is known before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from fastgen.optimizer.transformers.prefill import certain_steps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eos_token_id": 2}, -1),
        ({"eos_token_id": 2, "min_new_tokens": 5}, 4),
        ({"eos_token_id": 2, "min_length": 12}, 1),
        ({"eos_token_id": 2, "min_length": 5}, -1),
        ({"eos_token_id": 2, "min_length": 14, "min_new_tokens": 3}, 3),
        ({"eos_token_id": 2, "min_new_tokens": 99}, 19),
        ({}, 19),
        ({"max_time": 1.0}, 0),
        ({"eos_token_id": 2, "min_new_tokens": 5, "stop_strings": ["."]}, 0),
    ],
)
def test_certain_steps(options: dict[str, Any], expected: int) -> None:
    """A prompt of 10 tokens, and a capacity of 20."""
    call: Any = SimpleNamespace(runs_user_code=False)
    assert certain_steps(call, GenerationConfig(**options), 10, 20) == expected
    call.runs_user_code = True
    assert certain_steps(call, GenerationConfig(**options), 10, 20) == 0
