"""The largest scores of stored positions: those that `torch.topk` finds without the further room of the buffer."""

from __future__ import annotations

import pytest
import torch

from fastgen.ops.stored_topk import stored_topk

ROOM, K = 160, 12


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_the_same_ones_are_found_as_without_room(seed: int, masked: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, queries, length = 3, 1 + seed % 3, 20 + 10 * seed
    firsts = torch.randint(0, ROOM - length, (rows,), generator=generator)
    stored = torch.randn(rows, queries, length, generator=generator).relu()  # half of them are equal
    stored[0, :, :5] = masked  # padding in front
    scores = torch.full((rows, queries, ROOM), masked)
    for row, first in enumerate(firsts.tolist()):
        scores[row, :, first : first + length] = stored[row]
    found = stored_topk(scores, firsts, K) - firsts.view(-1, 1, 1)
    assert torch.equal(found, stored.topk(K, dim=-1).indices)


def test_queries_see_different_numbers_of_positions() -> None:
    scores = torch.arange(10.0).flip(0).expand(1, 3, 10).clone()
    for query in range(3):
        scores[0, query, 4 + query :] = -torch.inf
    found = stored_topk(scores, torch.tensor([2]), 4)
    assert found[0].sort(dim=1).values.tolist() == [[2, 2, 2, 3], [2, 2, 3, 4], [2, 3, 4, 5]]


def test_a_row_without_positions() -> None:
    scores = torch.full((2, 1, 10), -torch.inf)
    scores[1, 0, 3:7] = 1.0
    assert stored_topk(scores, torch.tensor([0, 3]), 2)[0].tolist() == [[0, 0]]


def test_shapes_for_a_compiler() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found = stored_topk(torch.empty(2, 3, 10), torch.empty(2, dtype=torch.int64), 4)
    assert found.shape == (2, 3, 4) and found.dtype is torch.int64
