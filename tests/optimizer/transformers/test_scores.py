"""The scores of a step: a sum that is put off, and ordinary tensors to everybody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastgen.optimizer.transformers import logits
from fastgen.optimizer.transformers.logits import LogProbabilities
from tests.noting import noted


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def _both(batch: int = 2, beams: int = 3) -> tuple[LogProbabilities, Tensor, Tensor]:
    """Log-probabilities as in the loop, the same plainly, and running scores."""
    plain = torch.randn(batch * beams, 40).log_softmax(dim=1)
    return LogProbabilities.of(plain), plain, torch.randn(batch, beams)


def test_the_way_through_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = noted(monkeypatch, logits, "best_candidates")
    ours, plain, running = _both()
    summed = torch.reshape(torch.reshape(ours, [2, 3, 40]) + running[:, :, None], (2, -1))
    expected = torch.reshape(torch.reshape(plain, [2, 3, 40]) + running[:, :, None], (2, -1))
    assert type(summed) is LogProbabilities and summed.shape == expected.shape
    values, indices = torch.topk(summed, k=6)
    assert len(asked) == 1 and type(values) is Tensor
    assert torch.equal(values, expected.topk(6).values) and torch.equal(indices, expected.topk(6).indices)


def test_everything_else_sees_the_sum() -> None:
    ours, plain, running = _both()
    summed = torch.reshape(torch.reshape(ours, [2, 3, 40]) + running[:, :, None], (2, -1))
    expected = (plain.view(2, 3, 40) + running[:, :, None]).view(2, -1)
    index = torch.tensor([[0, 5], [1, 100]])
    for made, wanted in (
        (torch.nn.functional.softmax(summed, dim=-1), expected.softmax(dim=-1)),
        (torch.gather(input=summed, dim=1, index=index), expected.gather(1, index)),
        (summed.clone(), expected),
        (summed[1], expected[1]),
        (summed.max(), expected.max()),
        (summed + 1, expected + 1),
        (1 + summed, expected + 1),
        (torch.stack([summed, expected]), torch.stack([expected, expected])),
        (summed.view(6, 40), expected.view(6, 40)),
        (summed.topk(2, dim=0).values, expected.topk(2, dim=0).values),
        (summed.topk(3, largest=False).values, expected.topk(3, largest=False).values),
        (torch.zeros(2, 120).copy_(summed), expected),
    ):
        assert type(made) is Tensor and torch.equal(made, wanted)
    assert summed.tolist() == expected.tolist()


def test_sums_of_another_kind_are_computed() -> None:
    ours, plain, running = _both()
    reshaped = torch.reshape(ours, [2, 3, 40])
    wanted = plain.view(2, 3, 40)
    for other in (running[:, :, None].double(), torch.randn(40), torch.randn(2, 1, 1), 2.0, wanted):
        made = reshaped + other
        assert type(made) is Tensor and torch.equal(made, wanted + other)
    once = reshaped + running[:, :, None]
    twice = once + running[:, :, None]
    assert torch.equal(twice, wanted + running[:, :, None] + running[:, :, None])


def test_a_write_is_not_lost() -> None:
    ours, plain, running = _both()
    expected = plain.clone()
    ours[0, 3] = 5.0
    expected[0, 3] = 5.0
    summed = torch.reshape(torch.reshape(ours, [2, 3, 40]) + running[:, :, None], (2, -1))
    assert summed.topk(1).values[0] == (expected[:3] + running[0][:, None]).max()
    for write in (lambda: summed.add_(1), lambda: summed.__setitem__(0, 1.0), lambda: summed.__iadd__(1)):
        with pytest.raises(RuntimeError, match="has not been computed"):
            write()
