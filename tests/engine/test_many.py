"""Many requests from many threads: some are cancelled, some raise, one runs out of memory. Nothing is left behind."""

from __future__ import annotations

import random
import threading
from typing import Any

import psutil
import pytest
import torch

import fastgen
from tests.engine.conftest import PROMPTS, WAIT, alone, raising
from tests.equivalence.models import BY_NAME

KINDS: list[dict[str, Any]] = [
    {}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 2.0}, {"do_sample": True},
    {"repetition_penalty": 1.3, "min_new_tokens": 4},
]  # fmt: skip


def _expected(model: Any) -> dict[tuple[int, int], Any]:
    """The result of each prompt with each kind of options, by numbers."""
    found = {}
    for kind, options in enumerate(KINDS):
        for number, prompt in enumerate(PROMPTS):
            torch.manual_seed(7)
            found[number, kind] = alone(model, prompt, max_new_tokens=12, **options)
    return found


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["llama", "marian"])
def test_many_threads(name: str, count: int) -> None:
    model = BY_NAME[name].build()
    expected, process = _expected(model), psutil.Process()
    with fastgen.Engine(model) as engine:  # what is opened once
        engine.generate(PROMPTS, max_new_tokens=2)
    threads, files = threading.active_count(), process.num_fds()
    wrong: list[Any] = []
    engine = fastgen.Engine(model, slots=16, max_waiting=24)
    left = iter(range(count))

    def user() -> None:
        for number in left:
            draw = random.Random(number)
            prompt, kind = draw.randrange(len(PROMPTS)), draw.randrange(len(KINDS))
            fate = "out of memory" if number == count // 2 else draw.choices(["", "cancel", "raise"], [85, 10, 5])[0]
            options = dict(KINDS[kind], max_new_tokens=12, seed=7 if KINDS[kind].get("do_sample") else None)
            if fate in ("raise", "out of memory"):
                error = MemoryError() if fate == "out of memory" else LookupError()
                options["logits_processor"] = [raising(error, every=5)]
            future = engine.submit(PROMPTS[prompt], **options)
            if fate == "cancel":
                future.cancel()
            elif fate:
                error = future.exception(WAIT)
                if not isinstance(error, (MemoryError, LookupError)):
                    wrong.append((number, error))
            elif not torch.equal(future.result(WAIT), expected[prompt, kind]):
                wrong.append((number, kind, prompt))

    users = [threading.Thread(target=user) for _ in range(32)]
    for each in users:
        each.start()
    assert torch.equal(alone(model, PROMPTS[0], max_new_tokens=12), expected[0, 0])  # the model is used meanwhile
    for each in users:
        each.join()
    engine.close()
    stats = engine.stats()
    assert not wrong
    assert stats["busy"] == stats["running"] == stats["waiting"] == 0
    assert stats["finished"] + stats["failed"] + stats["cancelled"] == stats["submitted"] == count
    assert threading.active_count() == threads and process.num_fds() == files
