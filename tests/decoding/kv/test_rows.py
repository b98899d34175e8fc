"""Where the positions of rows lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.kv.rows import Beams, StepState


@st.composite
def searches(draw):
    """(batch, per_input, steps): each step is the parent of every beam of every input, or None for no reorder."""
    batch, per_input = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    parents = st.lists(st.integers(0, per_input - 1), min_size=batch * per_input, max_size=batch * per_input)
    return batch, per_input, draw(st.lists(st.none() | parents, min_size=1, max_size=12))


@given(searches())
@settings(max_examples=100, deadline=None)
def test_ancestry_leads_to_the_histories_of_the_parents(search):
    """On the host and on the device, against histories that are simply copied."""
    batch, per_input, steps = search
    beams, state = Beams(batch, per_input), StepState(batch, per_input, len(steps), torch.device("cpu"))
    histories = [[] for _ in range(batch * per_input)]
    for step, parents in enumerate(steps):
        for row, history in enumerate(histories):
            history.append(row)  # the row that stores the position
        index = None
        if parents is not None:
            index = torch.tensor([parent + row // per_input * per_input for row, parent in enumerate(parents)])
            histories = [list(histories[parent]) for parent in index.tolist()]
            beams.update_ancestry(index, step + 1)
        state.advance(index)
        own = [[row] * (step + 1) for row in range(batch * per_input)]
        table = beams.ancestry(step + 1)
        assert (own if table is None else table.tolist()) == histories
        if per_input > 1:
            assert state.ancestry[:, : step + 1].tolist() == histories


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 2, 3, 4], [0, 1, 1, 3], [0, 0, 2, -1]])
def test_an_index_that_crosses_inputs_is_refused(index):
    with pytest.raises(ValueError, match="row indices|another input"):
        Beams(2, 2).update_ancestry(torch.tensor(index), 1)


def test_layers_of_different_lengths_do_not_share_a_table():
    beams, index = Beams(1, 2), torch.tensor([1, 0])
    beams.update_ancestry(index, 3)
    beams.update_ancestry(index, 3)
    assert beams.ancestry(4).tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    with pytest.raises(ValueError, match="3 and of 2 positions"):
        beams.update_ancestry(index, 2)
