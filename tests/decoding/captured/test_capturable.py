"""Numbers on the device: what their bounds decide, the host says without looking; and numbers of the host."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.capturable import Capturable, RowLengths, SymbolicLength, capturable
from tests.recorded_graph import RecordedGraph

LOW, HIGH = 3, 6
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def arange(*args: Any, **options: Any) -> Any:
    with Capturable():
        return torch.arange(*args, **options)


def getitem(table: torch.Tensor, index: Any) -> Any:
    with Capturable():
        return table[index]


def made() -> tuple[torch.Tensor, SymbolicLength]:
    number = torch.tensor(4)
    return number, SymbolicLength.of(number, LOW, HIGH)


@pytest.mark.parametrize("shift", [0, 2, -5])
@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparisons(compare: Callable[[Any, int], Any], shift: int) -> None:
    """A bool if it is the same for all that the number may be; otherwise a tensor, of what it is."""
    number, bounded = made()
    for other in range(LOW - 8, HIGH + 8):
        for answer, possible in (
            (compare(bounded + shift, other), {compare(n + shift, other) for n in range(LOW, HIGH + 1)}),
            (compare(other, shift + bounded), {compare(other, shift + n) for n in range(LOW, HIGH + 1)}),
        ):
            assert isinstance(answer, bool) == (len(possible) == 1)
            assert bool(answer) in possible
        assert bool(compare(bounded + shift, other)) == compare(int(number) + shift, other)


def test_it_is_what_is_in_memory() -> None:
    number, bounded = made()
    later = bounded - 1
    number.fill_(6)
    assert int(bounded) == 6 and int(bounded + 1) == 7 and int(later) == 3
    assert type(torch.arange(2) + bounded) is torch.Tensor and (torch.arange(2) + bounded).tolist() == [6, 7]
    assert max(bounded - 3, 0) - 0 == 3 and max(bounded - 9, 0) == 0


def test_truth() -> None:
    zero = SymbolicLength.of(torch.tensor(0), 0, 2)
    assert not zero and bool(zero + 1)
    graph = RecordedGraph()
    graph.capture(lambda: bool(zero + 1))
    with pytest.raises(RuntimeError, match="waits for the device"):
        RecordedGraph().capture(lambda: bool(zero))


TABLE = torch.arange(20).view(1, 20) * 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda bounded: torch.arange(bounded + 1, bounded + 4, dtype=torch.int64), [7, 8, 9]),
        (lambda bounded: TABLE[:, bounded + 1 : 4 + bounded][0], [14, 16, 18]),
    ],
)
def test_ranges_and_slices(function: Callable[[Any], torch.Tensor], expected: list[int]) -> None:
    """As BERT takes positions from a table: the host need not know where the slice begins."""
    (number, bounded), found, graph = made(), torch.zeros(3, dtype=torch.int64), RecordedGraph()
    graph.capture(capturable(lambda: found.copy_(function(bounded))))
    number.fill_(6)
    graph.replay()
    assert found.tolist() == expected


def test_what_waits_for_the_number() -> None:
    _, bounded = made()
    assert arange(bounded, 2 + bounded, dtype=torch.int32).tolist() == [4, 5] and arange(1, 3).tolist() == [1, 2]
    assert getitem(TABLE, (0, slice(bounded, bounded + 1))).tolist() == [8]


def test_ranges_and_slices_of_each_row() -> None:
    _, bounded = made()
    rows, table = RowLengths.of(torch.tensor([1, 4]), bounded), torch.arange(20).view(1, 20) * 2
    assert arange(rows, rows + 2).by_row.tolist() == [[1, 2], [4, 5]]
    assert getitem(table, (slice(None), slice(rows + 1, rows + 3))).by_row.tolist() == [[[4, 6]], [[10, 12]]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: torch.where(mask, x, -1.5),
        lambda x, mask: torch.where(mask, 2, x),
        lambda x, mask: torch.where(mask, 1.0, 0.0),
        lambda x, mask: torch.where(mask, x.long(), 2.5),
        lambda x, mask: torch.where(mask, x.half(), -float("inf")),
        lambda x, mask: x.where(mask, -2),
        lambda x, mask: x + torch.tensor(1.5, device=x.device, dtype=x.dtype),
        lambda x, mask: x + torch.tensor(2, device=x.device),
        lambda x, mask: torch.where(mask, torch.tensor(0.0, device=x.device, dtype=x.dtype), -3.0),
        lambda x, mask: x.index_copy(0, torch.tensor([2, 0], device=x.device), x[:2]),
        lambda x, mask: x + torch.tensor((1.5, -0.1, 2.0), device=x.device, dtype=x.dtype),
        lambda x, mask: mask & torch.tensor([True, False, True], device=x.device),
        lambda x, mask: x[[1]].neg_() + x,
        lambda x, mask: x.view(1, 3, 1)[..., [-1], :],
    ],
)
def test_numbers_are_made_on_the_device(device: torch.device, function: Callable[..., torch.Tensor]) -> None:
    """With the same result, of the same type; as it stands, it cannot be captured."""
    x, out = torch.tensor([0.5, -1.0, 2.0], device=device), list[torch.Tensor]()
    mask = x > 0
    wanted = function(x, mask)
    graphed: Any = graph.Graph(device) if device.type == "cuda" else RecordedGraph()
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="not permitted"):
            RecordedGraph().capture(lambda: function(x, mask))
    graphed.capture(capturable(lambda: out.append(function(x, mask))))
    graphed.replay()
    assert out[0].dtype == wanted.dtype
    assert torch.equal(out[0], wanted)


@pytest.mark.parametrize("index", [[3], [-4], (slice(None), [2]), (..., [-3])], ids=str)
def test_a_place_that_is_not_there(index: Any) -> None:
    x = torch.zeros(3, 2)
    with Capturable(), pytest.raises(IndexError):
        x[index]
