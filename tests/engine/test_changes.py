"""A model that changes between requests, in ways that its parameters' versions do not tell: nothing stale is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgen
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from tests.engine.conftest import WAIT, assert_as_alone, requests_for, run
from tests.equivalence.models import BY_NAME, FIRST_WORD, VOCABULARY

LONG = [FIRST_WORD + 37 * n % (VOCABULARY - FIRST_WORD) for n in range(80)]


def _writes(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.2)


def _writes_one_row(model: Any) -> None:
    model.get_input_embeddings().weight.data[LONG[3]] += 1


def _writes_to_what_is_frozen(model: Any) -> None:
    model.get_input_embeddings().weight.mul_(1.4)


def _hooks(model: Any) -> None:
    linear = next(each for each in model.modules() if isinstance(each, torch.nn.Linear))
    linear.register_forward_hook(lambda module, given, result: 1.5 * result)


def _sets(model: Any) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if hasattr(module, name):
                setattr(module, name, 0.5)


def _writes_to_a_buffer(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(1.5)


CHANGES = [_writes, _writes_one_row, _writes_to_what_is_frozen, _hooks, _sets, _writes_to_a_buffer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_what_prompts_share_is_of_the_model_as_it_is(name: str, change: Callable[[Any], None]) -> None:
    """Beginnings of prompts and encoded sources are read again behind a change."""
    model = copy.deepcopy(BY_NAME[name].build()).requires_grad_(False)
    executor = ContinuousBatches(model, 8)
    prompts = [[*LONG, n] for n in range(10, 13)] if name == "llama" else [LONG, LONG, LONG]
    for _ in range(2):
        requests = requests_for(model, prompts)
        run(executor, requests)
        with fastgen.disabled():
            assert_as_alone(model, requests, prompts)
        change(model)
    assert executor.prefills.shared_positions or executor.prefills.shared_sources


def test_a_request_behind_a_change_does_not_fail(llama: Any) -> None:
    """What is in slots begins again. One that comes runs on the model as it is, though code of the user's sees it."""
    executor, seen = ContinuousBatches(llama, 8), list[Any]()

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            seen.extend(tokens.flatten().tolist())

        def end(self) -> None:
            seen.append("end")

    first = make(llama, [5, 6, 7], None, {"max_new_tokens": 60, "eos_token_id": None}, None, 8)
    later = make(llama, [8, 9], None, {"max_new_tokens": 20, "eos_token_id": None, "streamer": Streamer()}, None, 8)
    waiting = [first]

    def more() -> list[Any]:
        if executor.counts["steps"] == 3 and not later.future.begun:
            _sets(llama)
            waiting.append(later)
        return executor.choose(waiting) if waiting else []

    for _ in executor.steps(more):
        pass
    assert seen == [*later.future.result(0)[0].tolist(), "end"]
    later.options["streamer"] = None
    assert_as_alone(llama, [first, later], [[5, 6, 7], [8, 9]])
    assert executor.counts["repeated"] == 1


def test_two_engines_that_draw() -> None:
    """Calls of their own draw from torch's generator, which is one for all threads."""
    model, prompts = BY_NAME["gemma2"].build(), [[5 + n, 6, 7] for n in range(6)]
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 25, "eos_token_id": None}
    fastgen.disable()
    with fastgen.Engine(model) as one, fastgen.Engine(model) as other:
        futures = [[each.submit(p, seed=n, **options) for n, p in enumerate(prompts)] for each in (one, other)]
        results = [[future.result(WAIT) for future in each] for each in futures]
        for number, prompt in enumerate(prompts):
            torch.manual_seed(number)
            expected = model.generate(torch.tensor([prompt]), **options)
            assert all(torch.equal(expected, each[number]) for each in results)
