"""Steps of a search."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.ops import search_step
from tests.ops.fuzz.cases import Case, maybe, of, rows_apart, size, untouched

_CPU = torch.device("cpu")
_VOCABULARY = 9


def _search(kind: type[Search], rng: random.Random, **options: Any) -> Any:
    batch, per_input, new_tokens = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 6)
    eos = rng.choice(((), (2,), (2, 5)))
    search = kind(batch, per_input, 3 + rng.randrange(3), new_tokens + rng.randrange(3), _CPU, eos, **options)
    prompt = torch.randint(_VOCABULARY, (rng.randint(0, batch), 2))
    penalty = {"length_penalty": rng.choice((-1.0, 0.0, 1.0, 2.0))} if kind is BeamSearch else {}
    search.begin(prompt, new_tokens, fill=1, **penalty)
    return search


def _case(name: str, call: Callable[[], object]) -> Case:
    """What a call gives to the operator, which is not called."""
    with (
        mock.patch.object(search_step, "available", lambda like: True),
        mock.patch.object(torch.ops.fastgen, name, create=True) as operator,
    ):
        call()
    return Case([each.clone() if isinstance(each, Tensor) else each for each in operator.call_args.args])


def _stops(rng: random.Random, count: int) -> Tensor | None:
    return maybe(rng, torch.rand(count) < rng.choice((0.0, 0.3, 1.0)))


@of("take_rows_")
def take_rows(rng: random.Random) -> Case:
    search = _search(Search, rng)
    rows = search.tokens.numel()
    for _ in range(rng.randrange(4)):
        search.take((torch.randint(_VOCABULARY, (rows,)),))
    proposal, stops = (torch.randint(_VOCABULARY, (rows,)),), _stops(rng, rows)
    return _case("take_rows_", lambda: search.take(proposal, stops))


def _candidates(rng: random.Random, search: BeamSearch) -> tuple[Tensor, ...]:
    shape = len(search.running_scores), search.candidates
    scores = -(torch.rand(shape) * rng.choice((3, 20, 10000))).round() / 4
    beams = torch.randint(search.running_scores.shape[1], shape)
    return scores.sort(dim=1, descending=True).values, beams, torch.randint(_VOCABULARY, shape)


@of("take_beams_")
def take_beams(rng: random.Random) -> Case:
    search = _search(BeamSearch, rng, early_stopping=rng.choice((False, True, "never")))
    for _ in range(rng.randrange(4)):
        search.take(_candidates(rng, search))
    proposal = _candidates(rng, search)
    stops = _stops(rng, proposal[0].numel())
    return _case("take_beams_", lambda: search.take(proposal, stops))


@of("commit_")
def commit(rng: random.Random) -> Case:
    width = rng.randint(1, 5)
    search = _search(SpeculativeSearch, rng, width=width, together=rng.random() < 0.5)
    rows = search.tokens.numel()
    accepted, ties = torch.full((rows,), 7), torch.zeros((), dtype=torch.int64)

    def step() -> tuple[Any, ...]:
        chosen = torch.randint(_VOCABULARY, (rows, width))
        for place in range(width - 1):
            is_right = torch.rand(rows) < 0.7
            search.draft(
                torch.where(is_right, chosen[:, place], (chosen[:, place] + 1) % _VOCABULARY), torch.tensor(place)
            )
        counts = torch.randint(width, (rows,))
        if rng.random() < 0.5:
            return chosen, counts, accepted, torch.rand(rows, width) < 0.4, ties
        accepted.copy_(counts)
        return chosen, None, accepted, None, ties

    for _ in range(rng.randrange(3)):
        search.commit(*step())
    run = step()
    return _case("commit_", lambda: search.commit(*run))


@of("advance_")
def advance(rng: random.Random) -> Case:
    batch, per_input, capacity, width = rng.randint(1, 3), rng.randint(1, 4), size(rng, 12), rng.randint(1, 3)
    stored = rng.randrange(6)
    state = StepState(batch, per_input, capacity, _CPU, width)
    rows = state.rows

    def some() -> tuple[Tensor, Tensor]:
        first = torch.arange(batch).unsqueeze(1) * per_input
        parents = (first + torch.randint(per_input, (batch, per_input))).view(-1)
        return parents, (torch.rand(batch, 1) < 0.8).long().repeat(1, per_input).view(-1)

    for _ in range(rng.randrange(4)):
        state.advance(*some())
    parents, taken = some()
    parents = maybe(rng, parents, 0.8)
    types = [rng.choice((torch.int64, torch.int32, torch.float32, torch.bool)) for _ in range(rng.randrange(3))]
    masks = [torch.zeros(rows, stored + capacity, dtype=dtype) for dtype in types]
    positions = [torch.arange(rows).unsqueeze(1) for _ in range(rng.randrange(2))]
    return Case(
        [
            parents, taken, torch.tensor(stored), state.position_table, state.ancestry,
            torch.zeros((), dtype=torch.int64), positions, masks, 1,
        ]
    )  # fmt: skip


@of("best_candidates_out")
def candidates(rng: random.Random) -> Case:
    inputs, beams, vocabulary = size(rng, 4), size(rng, 4), rng.choice((size(rng, 60), 1000))
    count = rng.randint(1, min(beams * vocabulary, 12))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    normalise = rng.random() < 0.5
    scores, running = torch.randn(inputs * beams, vocabulary).to(dtype), torch.randn(inputs, beams)
    shape = inputs, count
    given = [untouched(shape), *(untouched(shape, torch.int64) for _ in range(2)), scores, running, normalise]
    return Case(given)


@of("top_two_out")
def two(rng: random.Random) -> Case:
    rows, vocabulary, share = size(rng, 6, 0), rng.choice((size(rng, 80), 3000)), rng.choice((0.0, 1e-3, 0.3))
    scores = torch.randn(rows, vocabulary) if rng.random() < 0.7 else torch.randint(9, (rows, vocabulary)).float()
    if scores.numel() and rng.random() < 0.2:
        scores.view(-1)[rng.randrange(scores.numel())] = rng.choice((torch.nan, torch.inf, -torch.inf, 1e38))
    given = [untouched((rows,), torch.int64), untouched((rows,), torch.bool), scores, search_step.MASKED, share]
    return Case(given)


@of("no_repeat_ngram_")
def no_repeat_ngram(rng: random.Random) -> Case:
    sources, per_source, vocabulary = size(rng, 4), rng.choice((1, 2)), size(rng, 30)
    rows, length, n = sources * per_source, size(rng, 30), rng.choice((1, 2, 3, 4))
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    integer = rng.choice((torch.int32, torch.int64))
    scores = rows_apart(torch.randn(rows, vocabulary).to(dtype), rng)
    tokens = torch.randint(-1, 5, (rows, length)).to(integer)
    options: dict[str, Any] = {"context": None, "context_lengths": None}
    if rng.random() < 0.4:
        options["context"] = torch.randint(-1, 5, (sources, size(rng, 30))).to(integer)
        options["context_lengths"] = maybe(rng, torch.randint(-1, 40, (sources,)).to(integer))
    lengths = maybe(rng, torch.randint(-1, length + 2, (rows,)))
    return Case([scores, tokens, lengths, n, *options.values()])
