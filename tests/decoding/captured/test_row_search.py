"""Rows continued for themselves, against a loop that spells it out."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding.captured.search import NOTHING, Search

VOCABULARY, EOS, PAD = 7, 2, 0


def plain(prompt: torch.Tensor, steps: list[torch.Tensor], eos: list[int]) -> list[list[int]]:
    """Greedy search: the sequences, ended together with the last of them."""
    rows = [list(row) for row in prompt.tolist()]
    ended = [False] * len(rows)
    for scores in steps:
        for number, row in enumerate(rows):
            token = PAD if ended[number] else int(scores[number].argmax())
            row.append(token)
            ended[number] |= token in eos
        if all(ended):
            break
    return rows


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("eos", [[], [EOS], [EOS, 5]])
def test_greedy(device, eos, spare, late):
    prompt = torch.tensor([[3, 4], [5, 6], [4, 4]], device=device)
    steps = [torch.randn(3, VOCABULARY, device=device) for _ in range(9)]
    for number, row in ((1, 2), (4, 0), (5, 1)):
        steps[number][row, EOS] = 9.0  # so that rows end at different steps, before the last
    state = Search(3 + spare, 1, 2 + spare, 9 + spare, device, eos)
    state.begin(prompt, 9, fill=PAD)
    done = []
    for scores in steps + [torch.randn(3, VOCABULARY, device=device) for _ in range(late)]:
        state.choose(torch.cat([scores, torch.randn(spare, VOCABULARY, device=device)]), normalise=True)
        done.append(bool(state.done))
        if len(done) > late and done[-1 - late]:
            break
    wanted = plain(prompt, steps, eos)
    assert state.results(slice(3), 1).tolist() == wanted
    assert (state.running_tokens[:, :spare] == NOTHING).all()
    assert (len(wanted[0]) < 11) == bool(eos)


def test_copies(device):
    prompt = torch.tensor([[3, 4], [5, 6]], device=device)
    state = Search(4, 3, 2, 4, device)
    state.begin(prompt, 1)
    scores = torch.zeros(12, VOCABULARY, device=device)
    scores[torch.arange(12), torch.arange(12) % VOCABULARY] = 1
    state.choose(scores, normalise=True)
    assert bool(state.done)
    assert state.results(slice(2), 3)[:, -1].tolist() == [0, 1, 2, 3, 4, 5]
    assert state.results(slice(2), 3)[:, 0].tolist() == [3, 3, 3, 5, 5, 5]


def test_samples(device):
    """As often as their probabilities say; what has the probability 0, never."""
    count = 4000
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=device)
    state = Search(1, count, 1, 4, device, samples=True)
    state.begin(prompt, 4)
    probabilities = torch.tensor([0.0, 0.05, 0.2, 0.25, 0.5], device=device)
    state.choose(probabilities.log().expand(count, -1), normalise=True)
    drawn = torch.bincount(state.tokens, minlength=5) / count
    assert drawn[0] == 0
    assert ((drawn - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / count).sqrt() + 1e-9).all()
