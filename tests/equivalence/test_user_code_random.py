"""Code of the user's in `generate`: its calls, their arguments, tokens and exceptions are the library's.

Each kind of code alone, in the library's loop and in a captured step, and random ones together: `make test-long` runs
1,000 sequences of calls, `make test` a sample.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import settings
from fastgen.optimizer.transformers.captured import choice
from tests import near_ties
from tests.equivalence.captured import build, captures
from tests.equivalence.models import BY_NAME, EOS
from tests.equivalence.test_programs import programs  # noqa: F401 (steps are recorded at once)

CPU = torch.device("cpu")
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(16, 1000))]


class Planted(Exception):
    """What the user's code raises."""


class Log(list[Any]):
    """What the user's code was called with, in order."""

    def note(self, who: str, tokens: Any, scores: Any = None) -> None:
        seen = None if scores is None else (tuple(scores.shape), str(scores.dtype), scores.is_inference())
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        self.append((who, tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens, seen, mode))


class Processor(LogitsProcessor):
    """One that changes scores in some way, and keeps state."""

    def __init__(self, log: Log, name: str, kind: str, at: int) -> None:
        self.log, self.name, self.kind, self.at, self.calls = log, name, kind, at, 0
        self.own: torch.Tensor | None = None
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.log.note(self.name, input_ids, scores)
        self.calls += 1
        return getattr(self, self.kind)(input_ids, scores)

    def state(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 20 + self.calls * 7 % 100] += 4.0
        return scores

    def in_place(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 10 + self.calls % 60] = -float("inf")
        return scores.mul_(1.5)

    def own_tensor(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.own = torch.zeros_like(scores[0]) if self.own is None else self.own
        self.own[30 + self.calls % 100] += 3.0
        return scores + self.own

    def keeps(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """What it is given, without a copy, for a later step."""
        self.given.append((input_ids, scores))
        tokens, earlier = self.given[max(len(self.given) - 3, 0)]
        return scores + 0.5 * earlier + (tokens[:, -1:] % 3)

    def rolls(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(self.calls, dims=-1)

    def double(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.double() if self.calls >= self.at else scores

    def strided(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (scores * 1.1).t().contiguous().t()

    def tokens(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, input_ids.sum(1, keepdim=True) % 150, torch.full_like(scores[:, :1], 3.0))

    def writes(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.calls in (self.at + 1, self.at + 3):
            _write(input_ids, self.at)
        return self.tokens(input_ids, scores)

    def raises(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.calls == self.at:
            raise Planted(self.name)
        return scores


def _write(tokens: torch.Tensor, way: int) -> None:
    """Into the tokens that the user's code is given: their last ones, an end, their first, or behind torch's back."""
    if way % 4 == 0:
        tokens[:, -1] = 9
    elif way % 4 == 1:
        tokens[0, -1] = EOS
    elif way % 4 == 2:
        tokens[0, 0] = 11
    else:
        tokens.numpy()[:, -1:] = 17


class Criterion(StoppingCriteria):
    """One that ends sequences, or the call, and keeps state."""

    def __init__(self, log: Log, name: str, kind: str, at: int) -> None:
        self.log, self.name, self.kind, self.at, self.calls = log, name, kind, at, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.log.note(f"{self.name}, {len(scores or ())} scores", input_ids)
        self.calls += 1
        return getattr(self, self.kind)(input_ids)

    def all_at(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.full((len(tokens),), self.calls >= self.at + 3)

    def some(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, -1] % 11 == self.at

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """A tensor of its own, which it goes on to write into."""
        self.done = torch.zeros(len(tokens), dtype=torch.bool) if self.calls == 1 else self.done
        self.done |= tokens[:, -1] % 7 == self.at
        return self.done

    def writes(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.calls in (self.at, self.at + 3):
            _write(tokens, self.at)
        return torch.zeros(len(tokens), dtype=torch.bool)

    def raises(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.calls == self.at:
            raise Planted(self.name)
        return torch.zeros(len(tokens), dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self, log: Log, at: int) -> None:
        self.log, self.at, self.calls = log, at, 0

    def put(self, value: torch.Tensor) -> None:
        self.log.note("streamer", value)
        self.calls += 1
        if self.calls == self.at:
            raise Planted("streamer")

    def end(self) -> None:
        self.log.note("end", None)


class Prefix:
    def __init__(self, log: Log, at: int) -> None:
        self.log, self.at, self.calls = log, at, 0

    def __call__(self, batch: int, tokens: torch.Tensor) -> list[int]:
        self.log.note(f"prefix {batch}", tokens)
        self.calls += 1
        if self.calls == self.at:
            raise Planted("prefix")
        return [2, *range(20 + self.calls % 5, 120, 3)]


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


_PROCESSORS = ("state", "in_place", "own_tensor", "keeps", "rolls", "double", "strided", "tokens", "writes", "raises")
_CRITERIA = ("all_at", "some", "kept", "writes", "raises")
_MODES: list[Callable[[], Any]] = [
    contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode, torch.inference_mode,
    autocast,
]  # fmt: skip
_DECODING: list[dict[str, Any]] = [
    {"do_sample": False, "num_beams": 1},
    {"do_sample": False, "num_beams": 1},
    {"do_sample": True, "num_beams": 1},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "num_beams": 2},
]


def _draw_parts(rng: random.Random, options: dict[str, Any], rows: int) -> Callable[[Log], dict[str, Any]]:
    processors = [(kind, rng.randrange(1, 8)) for kind in rng.choices(_PROCESSORS, k=rng.choice([0, 1, 1, 2]))]
    criteria = [(kind, rng.randrange(1, 8)) for kind in rng.choices(_CRITERIA, k=rng.choice([0, 0, 1, 1, 2]))]
    streams = rows == 1 and options["num_beams"] == 1 and rng.random() < 0.2
    return _parts(processors, criteria, streams, rng.random() < 0.15, late=rng.choice([3, 1000, 1000]))


def _parts(
    processors: Sequence[tuple[str, int]] = (),
    criteria: Sequence[tuple[str, int]] = (),
    streams: bool = False,
    has_prefix: bool = False,
    late: int = 1000,
) -> Callable[[Log], dict[str, Any]]:
    """Makes the user's objects anew for each run, all of them with the same behaviour."""

    def make(log: Log) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if processors:
            parts = [Processor(log, f"processor {n}", *each) for n, each in enumerate(processors)]
            made["logits_processor"] = parts
        if criteria:
            parts = [Criterion(log, f"criterion {n}", *each) for n, each in enumerate(criteria)]
            made["stopping_criteria"] = StoppingCriteriaList(parts)
        if streams:
            made["streamer"] = Streamer(log, late)
        if has_prefix:
            made["prefix_allowed_tokens_fn"] = Prefix(log, 2 * late)
        return made

    return make


class Count:
    """What the sequences were."""

    sequences = captured = 0


def _same(model: Any, inputs: dict[str, Any], options: dict[str, Any], make: Any, mode: Any) -> None:
    logs: list[Log] = []

    def call() -> Any:
        logs.append(Log())
        torch.manual_seed(0)
        given = {name: value.clone() for name, value in inputs.items()}
        with mode():
            try:
                return model.generate(**given, **options, **make(logs[-1]))
            except Planted as error:
                assert error.__context__ is None and error.__cause__ is None
                return str(error)

    if mode is autocast:  # in bfloat16, FastGen rounds at other places
        with fastgen.disabled():
            original = call()
        found = call()
        assert type(found) is type(original)
        if not isinstance(found, torch.Tensor) or not torch.equal(found, original):
            return
        ours = found
    else:
        ours = near_ties.check(call)
    if len(logs) == 2:  # no near-tie was looked into
        original, found = logs
        if mode is autocast:
            # Beams that are not among the best at the end may have ended a step earlier.
            least = min(map(len, logs)) if options["num_beams"] > 1 else None
            original, found = ([(who, mode) for who, _, _, mode in log[:least]] for log in logs)
        assert found == original, next((a, b) for a, b in zip(found, original, strict=False) if a != b)
    assert ours is not None


def _sequence(rng: random.Random) -> None:
    model, inputs = build(BY_NAME[rng.choice(["llama", "bart", "gpt2"])], CPU)
    rows = rng.choice([1, 3])
    inputs = {name: value[:rows] for name, value in inputs.items()}
    options = {**rng.choice(_DECODING), "max_new_tokens": rng.choice([8, 14]), "min_new_tokens": rng.choice([0, 8])}
    if rows == 1 and options["num_beams"] == 1 and not options["do_sample"] and rng.random() < 0.2:
        options["prompt_lookup_num_tokens"] = 3
    with settings.changed(captured_step=rng.choice(["auto", "always", "always"])):
        for _ in range(rng.choice([1, 2, 3])):
            _same(model, inputs, options, _draw_parts(rng, options, rows), rng.choice(_MODES))
        Count.sequences += 1
        Count.captured += captures() > 0


@pytest.fixture(scope="module", autouse=True)
def sequences_are_worth_it() -> Iterator[None]:
    """Half of them have a captured step: counted in each process."""
    yield
    if Count.sequences >= 40:
        assert Count.captured >= 0.5 * Count.sequences, (Count.captured, Count.sequences)


@pytest.mark.parametrize("seed", SEEDS)
def test_users_code(seed: int) -> None:
    choice._writers.clear()
    _sequence(random.Random(seed))


KINDS: dict[str, Callable[[int], Callable[[Log], dict[str, Any]]]] = {
    **{f"processor {kind}": lambda at, kind=kind: _parts([(kind, at)]) for kind in _PROCESSORS},
    **{f"criterion {kind}": lambda at, kind=kind: _parts(criteria=[(kind, at)]) for kind in _CRITERIA},
    "both write": lambda at: _parts([("writes", at)], [("writes", at)]),
    "a streamer that raises": lambda at: _parts(streams=True, late=at + 2),
    "a prefix function that raises": lambda at: _parts(has_prefix=True, late=at + 2),
}


@pytest.mark.parametrize("captured_step", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_code(kind: str, captured_step: Any) -> None:
    """In two of the ways of decoding; a streamer sees one sequence."""
    choice._writers.clear()
    ways = [0] if "stream" in kind else [len(kind) % 4, (len(kind) + 2) % 4]
    for number in ways:
        decoding = _DECODING[1 + number]
        model, inputs = build(BY_NAME[("llama", "bart")[number % 2]], CPU)
        inputs = {name: value[: 1 if "stream" in kind else 3] for name, value in inputs.items()}
        options = {**decoding, "max_new_tokens": 12, "min_new_tokens": 8}
        options |= {"output_scores": True, "return_dict_in_generate": True} if number % 2 == 0 else {}
        with settings.changed(captured_step=captured_step):
            _same(model, inputs, options, KINDS[kind](number + 2), _MODES[1 + number])
