"""Tokens of any rows in one step: what they store and see is what each row alone would."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import RaggedState, StepState
from fastgen.decoding.kv.view import CannotBeCaptured

BATCH, HEADS, PREFIX, CAPACITY, DIM = 3, 2, 7, 11, 8


def stored(per_input: int, starts: list[int]) -> tuple[StepState, FixedKV]:
    """Rows that are as far as their numbers, with K and V of all positions up to there."""
    state = StepState(BATCH, per_input, CAPACITY, torch.device("cpu"))
    prefix = torch.randn(2, BATCH, HEADS, PREFIX, DIM)
    kv = FixedKV(*prefix, state, PREFIX, has_suffix=True)
    kv.load(*prefix, torch.tensor(starts), torch.full((BATCH,), PREFIX), at_end=True)
    for part in kv.suffix:
        part.copy_(torch.randn(part.shape))
    state.advance(None, torch.arange(state.rows) % 5)
    return state, kv


def attend(kv: FixedKV, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, *kv.write(*new))


@pytest.mark.parametrize("per_input", [1, 2])
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 0, 2], [0, 0, 1], [4, 3, 0]])
def test_tokens_are_stored_and_seen_as_those_of_one_row(per_input: int, counts: list[int]) -> None:
    torch.manual_seed(0)
    rows, kv = stored(per_input, [0, 3, PREFIX])
    counts = counts + [2, 0, 1] * (per_input - 1)
    size = sum(counts) + 2
    state = RaggedState(size, rows)
    ragged = kv.view(state)
    query, keys, values = torch.randn(3, size, HEADS, 1, DIM)
    state.spread(counts)
    assert state.row_map.bincount(minlength=rows.rows).sum() == size
    for tensor in (query, keys, values):  # what is left over is the first token again
        tensor[-2:] = tensor[0]
    before = [part.clone() for part in kv.suffix]
    state.locate()
    found = attend(ragged, query, (keys, values))

    # The same, a token at a time, each as a step in which its row is alone.
    alone = [part.clone() for part in before]
    for place, (owner, offset) in enumerate(zip(state.row_map.tolist(), state.offsets.tolist(), strict=True)):
        position = int(rows.position[owner]) + offset
        for part, new in zip(alone, (keys, values), strict=True):
            part[owner, :, position] = new[place, :, 0]
        first = int(kv.starts[owner // per_input])
        seen = [
            torch.cat([prefix[owner // per_input, :, first:], part[owner, :, : position + 1]], dim=1)
            for prefix, part in zip(kv.prefix, alone, strict=True)
        ]
        expected = torch.nn.functional.scaled_dot_product_attention(query[place], *seen)
        torch.testing.assert_close(found[place], expected, rtol=1e-5, atol=1e-5)
    for part, expected in zip(kv.suffix, alone, strict=True):
        assert torch.equal(part, expected), "nothing else is written"


def test_a_mask_that_says_what_the_lengths_say_is_recognised() -> None:
    rows, kv = stored(1, [0, 3, 5])
    state = RaggedState(5, rows)
    ragged = kv.view(state)
    state.spread([3, 0, 2])
    state.locate()
    at = torch.arange(PREFIX + CAPACITY)
    first = torch.tensor([0, 3, 5])[state.row_map].unsqueeze(1)
    mask = ((at >= first) & (at <= PREFIX + state.position.unsqueeze(1)))[:, None, None]
    assert ragged._equals_lengths(mask)
    mask[1, 0, 0, 5] ^= True
    assert not ragged._equals_lengths(mask)


@pytest.mark.parametrize("counts", [[0, 0, 0], [2, 2, 1]])
def test_only_as_many_tokens_as_there_are(counts: list[int]) -> None:
    state = RaggedState(4, StepState(BATCH, 1, CAPACITY, torch.device("cpu")))
    with pytest.raises(ValueError, match="tokens in a step of 4"):
        state.spread(counts)


def test_scores_that_a_model_computes_by_itself_are_refused() -> None:
    """A row would have to be copied for each of its tokens."""
    rows, kv = stored(1, [0, 0, 0])
    for size in (BATCH, 2 * BATCH):  # the shapes would fit, the rows would not
        ragged = kv.view(RaggedState(size, rows))
        with pytest.raises(CannotBeCaptured):
            torch.randn(size, HEADS, 1, DIM) @ ragged.read()[0].transpose(-1, -2)
