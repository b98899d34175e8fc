"""K and V of several streams, kept in parts: against the tensors that they stand for."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.kv.streams import StreamKVView
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.ops.attention import gather_suffix

BATCH, PER_INPUT, HEADS, DIM, STREAMS, PREFIX, CAPACITY = 2, 3, 2, 4, 3, 5, 6
ROWS = BATCH * PER_INPUT


@pytest.fixture
def stored() -> tuple[FixedKV, list[torch.Tensor], torch.Tensor]:
    """K and V after some steps, the full tensors, and which positions count, [rows, positions]."""
    torch.manual_seed(0)
    state = StepState(BATCH, PER_INPUT, CAPACITY, torch.device("cpu"))
    kv = FixedKV(*torch.randn(2, 1, HEADS, 1, DIM), state, PREFIX, has_suffix=True)
    kv.load(*torch.randn(2, BATCH, HEADS, PREFIX, DIM), torch.tensor([1, 0]), torch.tensor([5, 4]), at_end=False)
    state.begin()
    for number in range(3):
        if number:
            state.advance(torch.tensor([1, 1, 0, 5, 4, 4]))
        kv.write(*torch.randn(2, ROWS, HEADS, 1, DIM))
    full = [
        torch.cat([prefix.repeat_interleave(PER_INPUT, dim=0), gather_suffix(suffix, state.ancestry)], dim=2)
        for prefix, suffix in zip(kv.prefix, kv.suffix, strict=True)
    ]
    place = torch.arange(PREFIX + CAPACITY)
    starts, ends = (part.repeat_interleave(PER_INPUT).unsqueeze(1) for part in (kv.starts, kv.ends))
    counts = ((place >= starts) & (place < ends)) | ((place >= PREFIX) & (place < PREFIX + 3))
    return kv, full, counts


def combine(main: torch.Tensor, own: list[torch.Tensor], how: str) -> torch.Tensor:
    """[rows, streams, heads, positions, dim], in the ways in which models put it together."""
    each = [torch.cat([main, part], 2) for part in own]
    if how == "stacked":
        return torch.stack(each, 1)
    return torch.cat([part.unsqueeze(2) for part in each], 2).transpose(1, 2)


@pytest.mark.parametrize("how", ["stacked", "side by side"])
def test_products(stored: tuple, how: str) -> None:
    kv, (keys, values), counts = stored
    key_handle, value_handle = kv.read()
    own_keys, own_values = ([torch.randn(ROWS, HEADS, 1, DIM) for _ in range(STREAMS)] for _ in range(2))
    query = torch.randn(ROWS, STREAMS, HEADS, 2, DIM)

    streams = combine(key_handle, own_keys, how)
    wanted = combine(keys, own_keys, how)
    assert isinstance(streams, StreamKVView) and streams.shape == wanted.shape and streams.dtype == wanted.dtype
    scores = torch.einsum("bnhtc,bnhsc->bnhts", (query, streams))
    expected = torch.einsum("bnhtc,bnhsc->bnhts", (query, wanted))
    counts = torch.cat([counts, torch.ones(ROWS, 1, dtype=torch.bool)], dim=1)[:, None, None, None].expand_as(expected)
    torch.testing.assert_close(scores[counts], expected[counts])
    assert (scores[~counts] == torch.finfo(torch.float32).min).all()

    weights = scores.softmax(dim=-1)
    context = torch.einsum("bnhts,bnhsc->bnhtc", weights, combine(value_handle, own_values, how))
    torch.testing.assert_close(context, torch.einsum("bnhts,bnhsc->bnhtc", weights, combine(values, own_values, how)))


def test_anything_else_is_not_captured(stored: tuple) -> None:
    kv, _, _ = stored
    keys, values = kv.read()
    own = [torch.randn(ROWS, HEADS, 1, DIM) for _ in range(2)]
    streams = combine(keys, own, "stacked")
    query = torch.randn(ROWS, 2, HEADS, 1, DIM)
    for wants in (
        lambda: streams + 1,
        lambda: torch.stack([torch.cat([keys, own[0]], 2), torch.cat([values, own[0]], 2)], 1),
        lambda: torch.stack([torch.cat([keys, part], 2) for part in own], 3),
        lambda: torch.cat([streams, streams], 2),
        lambda: torch.cat([keys, own[0]], 1),
        lambda: torch.einsum("bnhtc,bnhsc->bhnts", query, streams),
        lambda: torch.einsum("bnhtc,bnhsc->bnhts", query, streams.transpose(1, 2)),
    ):
        with pytest.raises(CannotBeCaptured):
            wants()
