"""Which part of the histories of beams has to be moved, against histories that are simply copied."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.beams import Beams


@st.composite
def searches(draw):
    """(batch, per_input, steps): each step is the parent of every beam of every input, or None for no reorder."""
    batch, per_input = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    parents = st.lists(st.integers(0, per_input - 1), min_size=batch * per_input, max_size=batch * per_input)
    return batch, per_input, draw(st.lists(st.none() | parents, min_size=1, max_size=12))


@given(searches())
@settings(max_examples=200, deadline=None)
def test_moving_what_beams_say_gives_the_histories_of_the_parents(search):
    batch, per_input, steps = search
    beams = Beams(batch, per_input)
    expected = [[] for _ in range(batch * per_input)]
    stored = torch.full((batch * per_input, len(steps)), -1)
    for step, parents in enumerate(steps):
        for row in range(batch * per_input):
            token = 1000 * step + row  # every row appends something of its own
            expected[row].append(token)
            stored[row, step] = token
        if parents is None:
            continue
        index = torch.tensor([parent + row // per_input * per_input for row, parent in enumerate(parents)])
        expected = [list(expected[parent]) for parent in index.tolist()]
        move = beams.reorder(index, step + 1)
        if move is not None:
            stored[move.rows, move.start : step + 1] = stored[move.sources, move.start : step + 1]
        assert stored[:, : step + 1].tolist() == expected


def test_only_what_differs_is_moved():
    beams = Beams(1, 3)
    assert beams.reorder(torch.tensor([0, 1, 2]), 1) is None
    # Rows 1 and 2 become row 0, all of it.
    move = beams.reorder(torch.tensor([0, 0, 0]), 5)
    assert (move.rows.tolist(), move.sources.tolist(), move.start) == ([1, 2], [0, 0], 0)
    # They parted at position 5: what lies before is the same already.
    move = beams.reorder(torch.tensor([1, 0, 2]), 8)
    assert (move.rows.tolist(), move.sources.tolist(), move.start) == ([0, 1], [1, 0], 5)
    # Nothing new since they were made equal: nothing to move.
    beams.reorder(torch.tensor([2, 2, 2]), 9)
    assert beams.reorder(torch.tensor([1, 0, 2]), 9) is None


def test_the_same_index_object_is_worked_out_once():
    beams = Beams(1, 2)
    index = torch.tensor([1, 0])
    assert beams.reorder(index, 3) is beams.reorder(index, 3)


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 2, 3, 4], [0, 1, 1, 3], [0, 0, 2, -1]])
def test_an_index_that_crosses_inputs_is_refused(index):
    with pytest.raises(ValueError, match="row indices|another input"):
        Beams(2, 2).reorder(torch.tensor(index), 1)
    with pytest.raises(ValueError, match="row indices|another input"):
        Beams(2, 2).update_ancestry(torch.tensor(index), 1)


def test_layers_of_different_lengths_do_not_share_a_table():
    beams, index = Beams(1, 2), torch.tensor([1, 0])
    beams.update_ancestry(index, 3)
    beams.update_ancestry(index, 3)
    assert beams.ancestry(4).tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    with pytest.raises(ValueError, match="3 and of 2 positions"):
        beams.update_ancestry(index, 2)
