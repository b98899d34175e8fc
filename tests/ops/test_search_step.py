"""The bookkeeping of a search in one operator against the same in torch: all buffers, bit by bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.ops import _library, search_step
from tests.decoding.captured.replayed import Replayed

pytestmark = [
    pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process"),
    pytest.mark.sampled(5),
]

CPU = torch.device("cpu")
VOCABULARY = 9
NEVER = -1.0e9


def buffers(search: Search) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(search).items() if isinstance(value, torch.Tensor)}


def assert_same(found: Search, wanted: Search) -> None:
    for name, value in buffers(wanted).items():
        other = buffers(found)[name]
        assert other.dtype is value.dtype
        torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True, msg=f"{name}: {other} for {value}")


def take_both(ours: Search, torchs: Search, proposal: tuple[torch.Tensor, ...], stops: torch.Tensor | None) -> None:
    kept = [part.clone() for part in proposal]
    ours.take(proposal, stops)
    with mock.patch.object(search_step, "available", lambda like: False):
        torchs.take(proposal, stops)
    assert all(torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in zip(kept, proposal, strict=True))
    assert_same(ours, torchs)


searches = {
    "batch": st.integers(1, 4),
    "per_input": st.integers(1, 5),
    "present": st.integers(0, 4),
    "new_tokens": st.integers(1, 6),
    "spare": st.integers(0, 2),
    "eos": st.sampled_from([(), (2,), (2, 5), (0, 3, 7)]),
    "stopping": st.none() | st.sampled_from([0.0, 0.3, 0.97]),
    "steps": st.integers(1, 9),
    "later": st.none() | st.tuples(st.integers(0, 3), st.integers(0, 5)),
    "samples": st.booleans(),
    "seed": st.integers(0, 2**31),
}


def pair_of(
    kind: type[Search], batch: int, per_input: int, new_tokens: int, spare: int, **options: object
) -> list[Search]:
    return [kind(batch, per_input, 3 + spare, new_tokens + spare, CPU, **options) for _ in range(2)]


def prompts(inputs: int, width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (inputs, width), generator=generator)


def candidates_of(search: BeamSearch, levels: int, odd: float, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Sorted scores of few values, so that there are ties, and among them what a mask or the first step leaves."""
    batch, count = len(search.running_scores), search.candidates
    scores = -(torch.rand(batch, count, generator=generator) * levels).round() / 4
    odds = torch.tensor([NEVER, -torch.inf, NEVER - 64, torch.nan])
    chosen = odds[torch.randint(4, scores.shape, generator=generator)]
    scores = torch.where(torch.rand(scores.shape, generator=generator) < odd, chosen, scores)
    beams = torch.randint(search.running_scores.shape[1], (batch, count), generator=generator)
    tokens = torch.randint(VOCABULARY, (batch, count), generator=generator)
    return scores.sort(dim=1, descending=True).values, beams, tokens


@pytest.mark.sampled(1)  # both
@pytest.mark.parametrize("kind", [BeamSearch, Search])
@given(
    early_stopping=st.sampled_from([False, True, "never"]),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    levels=st.sampled_from([3, 20, 10000]),
    odd=st.sampled_from([0.0, 0.1, 0.6]),
    **searches,
)
@settings(max_examples=25)
def test_steps(
    kind, batch, per_input, present, new_tokens, spare, eos, stopping, steps, later, samples, seed, early_stopping,
    length_penalty, levels, odd,
):  # fmt: skip
    generator, of_beams = torch.Generator().manual_seed(seed), kind is BeamSearch
    options = {"eos": eos, "samples": samples} | ({"early_stopping": early_stopping} if of_beams else {})
    ours, torchs = pair_of(kind, batch, per_input, new_tokens, spare, **options)
    prompt = prompts(min(present, batch), 2, generator)
    for search in (ours, torchs):
        search.begin(prompt, new_tokens, fill=1, **({"length_penalty": length_penalty} if of_beams else {}))
    for step in range(steps):
        if later is not None and step == later[1]:  # an input begins while the others go on
            for search in (ours, torchs):
                alone = pair_of(kind, 1, per_input, new_tokens, spare, **options)[0]
                alone.begin(prompt[:1], max(new_tokens - 1, 1), **({"length_penalty": 0.5} if of_beams else {}))
                search.insert(alone, slice(1), slice(later[0] % batch, later[0] % batch + 1))
        if samples and seed % 5 == 0 and step == 2:
            for search in (ours, torchs):
                search.has_nan.fill_(True)
        drawn = torch.randint(VOCABULARY, (batch * per_input,), generator=generator)
        proposal = candidates_of(ours, levels, odd, generator) if of_beams else (drawn,)
        share = 1.0 if (seed + step) % 4 == 0 else stopping  # sometimes all end at once
        stops = None if stopping is None else torch.rand(proposal[0].numel(), generator=generator) < share
        take_both(ours, torchs, proposal, stops)


@given(
    width=st.integers(1, 5), together=st.booleans(), right=st.sampled_from([0.0, 0.8, 1.0]), greedy=st.booleans(),
    **{name: value for name, value in searches.items() if name not in ("stopping", "later")},
)  # fmt: skip
@settings(max_examples=25)
def test_runs(
    batch, per_input, present, new_tokens, spare, eos, steps, samples, seed, width, together, right, greedy
):  # fmt: skip
    """Rows that go on by several tokens, with drafts of which some are right."""
    generator = torch.Generator().manual_seed(seed)
    options = {"eos": eos, "samples": samples, "width": width, "together": together}
    ours, torchs = pair_of(SpeculativeSearch, batch, per_input, new_tokens, spare, **options)
    prompt = prompts(min(present, batch), 2, generator)
    rows, accepted, near_ties = batch * per_input, [], []
    for search in (ours, torchs):
        search.begin(prompt, new_tokens, fill=1)
        accepted.append(torch.full((rows,), 7))
        near_ties.append(torch.zeros((), dtype=torch.int64))
    for step in range(steps):
        chosen = torch.randint(VOCABULARY, (rows, width), generator=generator)
        near = torch.rand(rows, width, generator=generator) < 0.4 if greedy else None
        counts = torch.randint(width, (rows,), generator=generator)
        for place in range(width - 1):
            is_right = torch.rand(rows, generator=generator) < right
            drafted = torch.where(is_right, chosen[:, place], (chosen[:, place] + 1) % VOCABULARY)
            for search in (ours, torchs):
                search.draft(drafted, torch.tensor(place))
        if samples and seed % 5 == 0 and step == 2:
            ours.has_nan.fill_(True), torchs.has_nan.fill_(True)
        for number, search in enumerate((ours, torchs)):
            if not greedy:
                accepted[number].copy_(counts)
            with mock.patch.object(search_step, "available", lambda like, kernel=number == 0: kernel):
                search.commit(chosen, counts if greedy else None, accepted[number], near, near_ties[number])
        assert torch.equal(*accepted) and torch.equal(*near_ties)
        assert_same(ours, torchs)


def test_what_does_not_fit_into_a_run():
    search = SpeculativeSearch(1, 1, 3, 4, CPU, width=2, together=False)
    search.begin(torch.ones(1, 3, dtype=torch.int64), 4)
    ties, chosen = torch.zeros((), dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
    for accepted in (torch.tensor([2]), torch.tensor([-1]), torch.tensor([0, 0]), torch.tensor([0.0])):
        with pytest.raises(RuntimeError):
            search.commit(chosen, None, accepted, None, ties)
    search.length.fill_(9)
    with pytest.raises(RuntimeError, match="behind the buffer"):
        search.commit(chosen, torch.tensor([1]), torch.tensor([0]), None, ties)


@pytest.mark.parametrize("kind", [BeamSearch, Search])
def test_recorded(kind):
    """A replay reads what is in the buffers then, and the capture changes nothing."""
    generator = torch.Generator().manual_seed(3)
    recorded, plain = pair_of(kind, 2, 3, 6, 0, eos=(2,))
    for search in (recorded, plain):
        search.begin(prompts(2, 3, torch.Generator().manual_seed(1)), 6)

    def some() -> tuple[torch.Tensor, ...]:
        if kind is Search:
            return (torch.randint(VOCABULARY, (6,), generator=generator),)
        return candidates_of(plain, 20, 0.0, generator)

    proposal = some()
    stops = torch.zeros(proposal[0].numel(), dtype=torch.bool)
    program = Replayed()
    program.capture(lambda: recorded.take(proposal, stops))
    assert len(program.functions) == 1
    assert_same(recorded, plain)
    for step in range(7):
        for buffer, new in zip((*proposal, stops), (*some(), torch.rand(len(stops)) < 0.2 * step), strict=True):
            buffer.copy_(new)
        program.replay()
        plain.take(proposal, stops)
        assert_same(recorded, plain)
    assert plain.done


@given(
    batch=st.integers(1, 3),
    per_input=st.integers(1, 4),
    capacity=st.integers(1, 9),
    stored=st.integers(0, 5),
    width=st.integers(1, 2),
    types=st.lists(st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool]), max_size=2),
    has_parents=st.booleans(),
    steps=st.integers(1, 11),
    seed=st.integers(0, 2**31),
)
def test_advance(batch, per_input, capacity, stored, width, types, has_parents, steps, seed):
    """Rows that go on, some of them beyond the capacity, and rows that stay."""
    generator = torch.Generator().manual_seed(seed)
    ours, torchs = (StepState(batch, per_input, capacity, CPU, width) for _ in range(2))
    rows = ours.rows
    seen, positions = torch.zeros((), dtype=torch.int64), [torch.arange(rows).unsqueeze(1)]
    masks = [torch.zeros(rows, stored + capacity, dtype=dtype) for dtype in types]
    wanted_position, wanted_masks = positions[0].clone(), [mask.clone() for mask in masks]
    for _ in range(steps):
        first = torch.arange(batch).unsqueeze(1) * per_input
        parents = (first + torch.randint(per_input, (batch, per_input), generator=generator)).view(-1)
        taken = (torch.rand(batch, 1, generator=generator) < 0.8).long().repeat(1, per_input).view(-1)
        given_parents = parents if has_parents else None
        torch.ops.fastgen.advance_(
            given_parents, taken, torch.tensor(stored), ours.position_table, ours.ancestry, seen, positions, masks
        )
        torchs.advance(given_parents, taken)
        assert torch.equal(ours.position_table, torchs.position_table) and int(seen) == stored + int(
            torchs.position.max()
        )
        assert ours.ancestry is None if per_input == 1 else torch.equal(ours.ancestry, torchs.ancestry)
        assert torch.equal(positions[0], wanted_position.add_(taken.unsqueeze(1)))
        for found, mask in zip(masks, wanted_masks, strict=True):
            mask[torch.arange(stored + capacity) == stored + torchs.position.unsqueeze(1)] = 1
            assert torch.equal(found, mask)


@pytest.mark.parametrize("beam", [-1, 3, 2**40])
def test_a_beam_that_is_not_there(beam):
    search = BeamSearch(2, 3, 4, 6, CPU, (2,))
    search.begin(torch.ones(2, 3, dtype=torch.int64), 6)
    proposal = candidates_of(search, 20, 0.0, torch.Generator().manual_seed(0))
    proposal[1][1, 2] = beam
    with pytest.raises(RuntimeError, match="a beam that is not there"):
        search.take(proposal)
    assert (search.length == 4).all()
