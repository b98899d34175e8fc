"""A recording for any number of inputs does what one for that number does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgen.decoding.captured.program import Program, prepared
from fastgen.decoding.captured.symbolic_batch import (
    DoesNotFollow,
    NotSymbolic,
    Recorded,
    SymbolicRecording,
    batches,
    tensors_of,
)
from fastgen.decoding.program_memory import Arena, Growing

BOTH, HEADS, DIM = (13, 17), 3, 4
WEIGHT = torch.randn(HEADS * DIM, HEADS * DIM)
Buffers = dict[str, Tensor]


def buffers_for(batch: int) -> Buffers:
    given = torch.Generator().manual_seed(batch)
    return {
        "x": torch.randn(batch * 2, HEADS * DIM, generator=given),
        "table": torch.arange(3 * batch * 2).view(3, batch * 2),
        "out": torch.zeros(batch * 2, HEADS * DIM),
        "flag": torch.zeros((), dtype=torch.bool),
    }


def symbolic(function: Callable[[Buffers], object]) -> SymbolicRecording:
    recorded = []
    for batch in BOTH:
        own = buffers_for(batch)
        recorded.append(Recorded(prepared(lambda own=own: function(own), Arena()), batch, own, None))  # type: ignore[misc]
    return SymbolicRecording(*recorded)


def product(own: Buffers) -> None:
    own["out"].copy_((own["x"] @ WEIGHT + 1).relu())


def by_head(own: Buffers) -> None:
    """Rows are the second dimension in memory for a while, and one with the heads."""
    rows = own["x"].view(-1, HEADS, DIM).transpose(0, 1).contiguous()
    scores = rows.reshape(-1, DIM).cumsum(0).view(HEADS, -1, DIM)
    own["out"].copy_(scores.transpose(0, 1).reshape(-1, HEADS * DIM))


def by_place(own: Buffers) -> None:
    """Some of a buffer's rows, and a range that is as long as the batch."""
    order = torch.arange(len(own["x"])).flip(0)
    own["out"].copy_(own["x"].index_select(0, order) * own["table"][2].unsqueeze(1) + own["table"][1:].sum())
    own["flag"].copy_((own["x"][:, 5:] > 0).all())


def made(own: Buffers) -> None:
    larger = torch.zeros(len(own["x"]), 2, HEADS * DIM)
    larger[:, 1] = own["x"]
    larger[:, 0] = own["x"].new_full((len(own["x"]), HEADS * DIM), 3.0).cumsum(0)
    own["out"].copy_(larger.sum(dim=1))


def numbers(own: Buffers) -> None:
    """Sizes and numbers that are no multiples of the batch, and some that a batch of those that were recorded has."""
    rows = len(own["x"])
    last = own["x"].new_full((rows + 1, 34), rows - 1).clamp(max=rows)
    best = torch.cat([own["x"], own["x"], own["x"][:, :2]], dim=1).topk(17, dim=1).values
    own["out"].copy_(last[1:, :12] + best[:, 5:17])


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("function", [product, by_head, by_place, made, numbers])
def test_what_is_specialized_does_what_was_recorded(function: Callable[[Buffers], None], batch: int) -> None:
    own, expected = buffers_for(batch), buffers_for(batch)
    symbolic(function).specialize(own, batch, batch, None).replay()
    recorded = Program()
    recorded.capture(lambda: function(expected))
    recorded.replay()
    assert all(torch.equal(own[name], expected[name]) for name in own)


@pytest.mark.parametrize("function", [product, by_head, by_place, made])
def test_the_first_inputs_of_larger_buffers(function: Callable[[Buffers], None]) -> None:
    own, whole = buffers_for(9), buffers_for(9)
    before = {name: buffer.clone() for name, buffer in own.items()}
    symbolic(function).specialize(own, 9, 4, None).replay()
    rows = {
        name: part[..., :8] if name == "table" else part[:8] if part.dim() else part for name, part in whole.items()
    }
    function(rows)
    assert torch.equal(own["out"][:8], rows["out"]) and torch.equal(own["out"][8:], before["out"][8:])
    assert torch.equal(own["flag"], rows["flag"])


def test_random_numbers_are_those_of_a_recording() -> None:
    def draws(own: Buffers) -> None:
        own["out"].copy_(torch.empty_like(own["x"]).exponential_())

    own, found = buffers_for(3), symbolic(draws)
    torch.manual_seed(5)
    found.specialize(own, 3, 3, None).replay()
    torch.manual_seed(5)
    assert torch.equal(own["out"], torch.empty(6, HEADS * DIM).exponential_())


def test_what_says_too_little_is_refused() -> None:
    weight = torch.randn(HEADS * DIM)

    def with_another(own: Buffers) -> None:
        own["out"].copy_(own["x"] + torch.randn_like(own["x"][:, :1]) + others[len(own["x"])].unsqueeze(1))

    def of_a_part(own: Buffers) -> None:
        own["out"].copy_(own["x"] * (1.0 / len(own["x"])))

    def more_for_many(own: Buffers) -> None:
        own["out"].copy_(own["x"].relu() if len(own["x"]) > 30 else own["x"].relu().neg())

    def another_for_many(own: Buffers) -> None:
        own["out"].copy_(own["x"].relu() if len(own["x"]) > 30 else own["x"].neg())

    def writes_elsewhere(own: Buffers) -> None:
        weight.copy_(own["x"].sum(dim=0))

    def squares(own: Buffers) -> None:
        own["out"].copy_((own["x"] @ own["x"].t()).flatten().new_ones(len(own["x"]), 1))
        own["flag"].copy_((own["x"] @ own["x"].t()).flatten().all())

    others = {2 * batch: torch.randn(2 * batch) for batch in BOTH}  # not the steps' own
    before = weight.clone()
    for function in (with_another, of_a_part, more_for_many, another_for_many, writes_elsewhere, squares):
        try:
            symbolic(function)
        except NotSymbolic:
            continue
        pytest.fail(function.__name__)
    assert torch.equal(weight, before)


def test_there_is_room_for_so_many_inputs() -> None:
    with pytest.raises(NotSymbolic):
        symbolic(product).specialize(buffers_for(18), 18, 18, None)


def test_another_step_must_have_the_same_parts() -> None:
    found = symbolic(product)
    for wrong in (
        {"out": torch.zeros(4, 1)},
        {"x": torch.zeros(4, HEADS * DIM, 1)},
        {"x": torch.zeros(6, HEADS * DIM)},
    ):
        with pytest.raises(NotSymbolic):
            found.specialize(buffers_for(2) | wrong, 2, 2, None)
    missing = buffers_for(2)
    del missing["x"]
    with pytest.raises(NotSymbolic):
        found.specialize(missing, 2, 2, None)


def test_no_size_is_a_multiple_of_what_is_recorded() -> None:
    assert next(batches(3, [64, 49152])) == (13, 17)
    assert next(batches(3, [26, 0])) == (11, 19)
    assert next(batches(40, [122])) == (59, 71)
    assert not list(batches(10_000, []))


def test_buffers_that_grow_may_have_any_size() -> None:
    """A view of the first rows goes where the buffer goes."""

    def made(batch: int) -> tuple[Buffers, Growing]:
        growing = Growing()
        parts = {name: torch.zeros(batch, 2, 40, 3) for name in ("keys", "values")}
        growing.add(parts["keys"], parts["values"])
        return parts | {"new": torch.randn(batch, 2, 3), "at": torch.full((batch,), 7)}, growing

    def writes(own: Buffers) -> None:
        torch.ops.fastgen.kv_write(own["new"] * 2, own["new"], own["keys"], own["values"], own["at"])

    def recorded(function: Callable[[Buffers], None], batch: int) -> Recorded:
        own, growing = made(batch)
        growing.lengths = frozenset((40,))
        return Recorded(prepared(lambda: function(own), Arena()), batch, own, growing)

    found = SymbolicRecording(*(recorded(writes, batch) for batch in BOTH))
    own, growing = made(4)
    program = found.specialize(own, 4, 3, growing)
    assert found.follows and program.follows
    program.replay()
    assert torch.equal(own["keys"][:3, :, 7], own["new"][:3] * 2) and not own["keys"][3].any()
    for name in ("keys", "values"):
        growing.exchange(own[name], torch.zeros(4, 2, 90, 3))
    own["at"].fill_(80)
    program.replay()
    assert torch.equal(own["values"][:3, :, 80], own["new"][:3]) and not own["values"][3].any()

    def reads(own: Buffers) -> None:
        own["new"].copy_(own["keys"].sum(dim=2))

    def has_the_length(own: Buffers) -> None:
        own["new"].add_(torch.full((), 40))

    def has_it_where_nobody_reads_it(own: Buffers) -> None:
        torch.arange(40)
        writes(own)

    for function in (reads, has_the_length):
        with pytest.raises(DoesNotFollow):
            SymbolicRecording(*(recorded(function, batch) for batch in BOTH))
    assert SymbolicRecording(*(recorded(has_it_where_nobody_reads_it, batch) for batch in BOTH)).follows


def test_tensors_are_found_by_where_they_are() -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    assert tensors_of([first, {"a": second}], (second,)) == {".0.0": first, ".0.1.a": second, ".1.0": second}
    assert isinstance(Program(), Program) and not tensors_of(object(), 3, "text")
