"""Random mixtures of requests: each gets the tokens of a call of its own, whatever runs beside it.

A mixture is one model and some requests with options of their own, which threads submit at random moments. Some are
cancelled, some have a processor that raises. `make test` runs a sample of the mixtures, `make test-long` all.
"""

from __future__ import annotations

import concurrent.futures
import copy
import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import fastgen
from tests import near_ties
from tests.engine.conftest import WAIT
from tests.equivalence.check import in_threads
from tests.equivalence.models import BY_NAME, EOS, FIRST_WORD, PAD, VOCABULARY, Family
from tests.equivalence.others import OTHERS

MIXTURES = 300
REQUESTS, THREADS = 14, 3
KINDS = 3  # of options in a mixture: some requests have the same
LONGEST_PROMPT, MOST_NEW_TOKENS = 40, 24
# Of the results, where a request asks for more than tokens.
COMPARED = ("sequences", "sequences_scores", "scores")
FAMILIES = [*BY_NAME.values(), *(each for each in OTHERS if each.name.startswith(("falcon", "deepseek")))]


class Bans:
    """A processor of a user's: bans a token, and keeps what it has seen. It may raise in its third step."""

    def __init__(self, token: int, raises: bool = False) -> None:
        self.token, self.raises, self.seen = token, raises, list[Any]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        if self.raises and len(self.seen) == 3:
            raise LookupError("the processor")
        scores[:, self.token] = -torch.inf
        return scores


class EndsAt:
    """A criterion of a user's: a row ends at any token of a range."""

    def __init__(self, start: int) -> None:
        self.start, self.seen = start, list[Any]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        last = input_ids[:, -1]
        return (last >= self.start) & (last < self.start + 8)


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.clone())

    def end(self) -> None:
        self.seen.append("end")


@dataclass
class Submission:
    """One request, and what becomes of it.

    Attributes:
        inputs: as the engine takes them.
        options: of the generation config.
        users: what makes the user's code, by the argument that it is given as.
        has_config: the options are given as a generation config.
        seed: of what it draws.
        cancelled_after: seconds from its arrival; None where it is not cancelled.
    """

    inputs: Any
    options: dict[str, Any]
    users: dict[str, Any]
    has_config: bool
    seed: int | None
    cancelled_after: float | None
    future: Any = None
    code: dict[str, Any] = field(default_factory=dict)  # the user's, in the engine

    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate` besides the input, with new objects of the user's; the latter are kept in `code`."""
        self.code = {name: make() for name, make in self.users.items()}
        options = {"generation_config": GenerationConfig(**self.options)} if self.has_config else self.options
        lists = ("logits_processor", "stopping_criteria")
        return {**options, **{name: [each] if name in lists else each for name, each in self.code.items()}}

    def raises(self) -> bool:
        """Whether its processor has come to the step in which it raises."""
        return any(getattr(each, "raises", False) and len(each.seen) >= 3 for each in self.code.values())

    def outcome(self, result: Any) -> dict[str, Any]:
        """What is compared: the sequences, with scores where they are asked for, and what the user's code has seen."""
        if not isinstance(result, torch.Tensor):
            result = {name: result[name] for name in COMPARED if result.get(name) is not None}
        seen: dict[str, Any] = {name: each.seen for name, each in self.code.items()}
        if "stopping_criteria" in seen and self.options["num_beams"] > 1:
            # A criterion sees all candidates of the beams: there are near-ties among those that come to nothing.
            seen["stopping_criteria"] = [each.shape for each in seen["stopping_criteria"]]
        return {"result": result, "seen": seen}

    def alone(self, model: Any) -> dict[str, Any]:
        """What a call of its own gives."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        given = {"inputs": torch.tensor([self.inputs])} if isinstance(self.inputs, list) else copy.deepcopy(self.inputs)
        return self.outcome(model.generate(**given, **self.arguments()))


def _inputs(draw: random.Random, family: Family) -> Any:
    if family.inputs == "audio":
        return {"input_features": family.make_inputs(4)["input_features"][draw.randrange(4)].unsqueeze(0)}
    prompt = [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(draw.randint(1, LONGEST_PROMPT))]
    if draw.random() < 0.9:
        return prompt
    # A row out of a padded batch.
    missing = draw.randint(1, 5)
    prompt = prompt[: LONGEST_PROMPT - missing]
    padding, zeros, ones = [PAD] * missing, [0] * missing, [1] * len(prompt)
    is_right = family.encoder_decoder
    ids, mask = (prompt + padding, ones + zeros) if is_right else (padding + prompt, zeros + ones)
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}


def _decoding(draw: random.Random, family: Family) -> dict[str, Any]:
    """Greedy search, sampling, or either with beams."""
    options: dict[str, Any] = {"num_beams": 1, "do_sample": False}
    if draw.random() < 0.5:
        options["num_beams"] = draw.randint(2, 4)
        options["length_penalty"] = draw.choice([-1.0, 0.0, 0.5, 1.0, 2.0])
        options["early_stopping"] = draw.choice([True, False, "never"])
    if draw.random() < 0.3:
        options["do_sample"] = True
        options |= draw.choice([{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 0, "min_p": 0.05}])
    most = 3 if options["num_beams"] == 1 and options["do_sample"] else options["num_beams"]
    options["num_return_sequences"] = draw.choice([1, 1, draw.randint(1, most)])
    return options


def _lengths(draw: random.Random, family: Family) -> dict[str, Any]:
    new = draw.randint(1, MOST_NEW_TOKENS)
    if draw.random() < 0.7:
        return {"max_new_tokens": new, **({"min_new_tokens": draw.randint(0, new)} if draw.random() < 0.3 else {})}
    longest = new + (1 if family.encoder_decoder else LONGEST_PROMPT)
    return {"max_new_tokens": None, "max_length": longest, "min_length": draw.choice([0, draw.randint(1, longest)])}


def _options(draw: random.Random, family: Family) -> dict[str, Any]:
    """Options of the generation config."""
    options = _decoding(draw, family)
    if family.inputs == "audio":  # its `generate` takes other options
        return {"num_beams": options["num_beams"], "max_new_tokens": draw.randint(1, MOST_NEW_TOKENS)}
    # Several ends: rows end at different steps.
    ends = [EOS, *draw.sample(range(FIRST_WORD, VOCABULARY), draw.choice([0, 4, 30]))]
    options |= {"pad_token_id": PAD, "eos_token_id": ends, **_lengths(draw, family)}
    for name, values in {
        "repetition_penalty": [1.3, 0.8],
        "no_repeat_ngram_size": [1, 2, 3],
        "encoder_repetition_penalty": [1.4],
        "bad_words_ids": [[[9, 10], [33]]],
        "suppress_tokens": [[40, 41]],
        "forced_eos_token_id": [EOS],
        "renormalize_logits": [True],
        "return_dict_in_generate": [True],
    }.items():
        if draw.random() < 0.12:
            options[name] = draw.choice(values)
    if options.get("return_dict_in_generate"):
        options["output_scores"] = True
    return options


def _numbers(draw: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Those of processors, of which each request of a kind has its own."""
    if draw.random() < 0.5:
        return {}
    own = {"temperature": draw.uniform(0.5, 1.5)} if options.get("do_sample") else {}
    ranges = {"top_p": (0.5, 0.99), "min_p": (0.01, 0.3), "repetition_penalty": (0.7, 1.5)}
    own |= {name: draw.uniform(*bounds) for name, bounds in ranges.items() if name in options}
    return own | ({"top_k": draw.randint(1, 40)} if options.get("top_k") else {})


def _submission(draw: random.Random, family: Family, options: dict[str, Any]) -> Submission:
    users: dict[str, Any] = {}
    options = {**options, **_numbers(draw, options)}
    if family.inputs != "audio":
        if draw.random() < 0.2:
            token, raises = draw.randrange(FIRST_WORD, VOCABULARY), draw.random() < 0.2
            users["logits_processor"] = lambda: Bans(token, raises)
        if draw.random() < 0.1:
            start = draw.randrange(FIRST_WORD, VOCABULARY)
            users["stopping_criteria"] = lambda: EndsAt(start)
        if options["num_beams"] == options["num_return_sequences"] == 1 and draw.random() < 0.15:
            users["streamer"] = Streamed
    seed = draw.randrange(1000) if options.get("do_sample") or draw.random() < 0.1 else None
    has_config = draw.random() < 0.3 and options["max_new_tokens"] is not None
    cancelled_after = draw.choice([0.0, draw.random() * 0.05]) if draw.random() < 0.15 else None
    return Submission(_inputs(draw, family), options, users, has_config, seed, cancelled_after)


def _submit(engine: Any, submissions: list[Submission], draw: random.Random) -> None:
    """What a thread of a user's does."""
    for each in submissions:
        time.sleep(draw.choice([0.0, draw.random() * 0.02]))
        each.future = engine.submit(each.inputs, seed=each.seed, **each.arguments())
        if each.cancelled_after is not None:
            time.sleep(each.cancelled_after)
            each.future.cancel()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", range(MIXTURES))
def test_each_request_gets_its_own(number: int) -> None:
    draw = random.Random(number)
    family = draw.choice(FAMILIES)
    model = family.build()
    kinds = [_options(draw, family) for _ in range(KINDS)]
    submissions = [_submission(draw, family, draw.choice(kinds)) for _ in range(REQUESTS)]
    with fastgen.Engine(model, slots=draw.choice([4, 8, 16, "auto"])) as engine:
        in_threads(lambda n: _submit(engine, submissions[n::THREADS], random.Random(number + n)), THREADS)
        concurrent.futures.wait([each.future for each in submissions], WAIT)
    stats = engine.stats()
    for each in submissions:
        _check(model, each)
    assert stats["waiting"] == stats["running"] == 0 and stats["submitted"] == REQUESTS
    assert stats["finished"] + stats["failed"] + stats["cancelled"] == REQUESTS


def _check(model: Any, submission: Submission) -> None:
    """That a request got what a call of its own gives, and its code saw what it sees there."""
    future = submission.future
    if future.cancelled():
        assert submission.cancelled_after is not None
        return
    error = future.exception()
    if isinstance(error, LookupError) and not submission.raises():  # the library's own, of Whisper with one token
        with fastgen.disabled(), pytest.raises(type(error), match=re.escape(str(error))):
            submission.alone(model)
        return
    if isinstance(error, LookupError):
        return
    found = submission.outcome(future.result())
    with fastgen.disabled():
        expected = submission.alone(model)
    try:
        near_ties.assert_same(expected, found)
    except AssertionError as difference:
        near_ties.settle(lambda: submission.alone(model), expected, found, difference)
