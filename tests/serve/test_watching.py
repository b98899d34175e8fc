"""What is streamed of a request begins its result, whatever the options; log-probabilities are the model's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastgen_serve.errors import Failed
from fastgen_serve.jobs import Delta, Generate, Generated
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from fastgen_serve.workers.watching import BeamWatcher, Ends, RowWatcher, StopTexts
from tests.serve.checkpoints import of_job
from tests.serve.servers import BART, GPT2

TEXTS = (
    "and the lord spake unto moses saying", "fear not", "in the beginning", "and it came to pass", "the wicked",
    "wisdom is better than rubies and all the things", "jesus wept", "blessed are the meek",
    "go to the ant thou sluggard",
)  # fmt: skip


# Texts that end a sequence.
ONE, SOME = ("the",), (" of", "to Mos", " is")


@pytest.fixture(scope="module", params=[BART, GPT2], ids=["bart", "gpt2"])
def model(request: pytest.FixtureRequest, enabled: None) -> Iterator[LocalModel]:
    made = LocalModel("m", ServeSettings(models=(("m", request.param),), warm_up=False))
    yield made
    made.close()


async def streamed(model: LocalModel, job: Generate) -> tuple[list[Delta], Generated]:
    """The deltas of a stream, and its result, which comes last."""
    *deltas, result = [answer async for _, answer in model.stream_all([job])]
    return deltas, result


def run(model: LocalModel, jobs: list[Generate]) -> list[tuple[list[Delta], Generated]]:
    async def together() -> Any:
        return await asyncio.gather(*(streamed(model, job) for job in jobs))

    return asyncio.run(together())


def jobs(model: LocalModel, **options: Any) -> list[Generate]:
    tokens = [tuple(model.tokenizer(text).input_ids) for text in TEXTS]
    return [
        Generate(each, {"max_new_tokens": 24, **options}, seed=seed, streams=True) for seed, each in enumerate(tokens)
    ]


def joined(deltas: list[Delta], index: int) -> tuple[int, ...]:
    return tuple(token for delta in deltas if delta.index == index for token in delta.tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "early_stopping": True},
        {"num_beams": 4, "early_stopping": False},
        {"num_beams": 5, "early_stopping": "never", "length_penalty": 2.0},
        {"num_beams": 4, "length_penalty": -1.0, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True, "temperature": 1.5},
        {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3, "no_repeat_ngram_size": 2, "max_new_tokens": 40},
    ],
    ids=lambda options: "-".join(options),
)
def test_with_beams_a_beginning_of_the_best_one_streams(model: LocalModel, options: dict[str, Any]) -> None:
    found = run(model, jobs(model, **options)[:5])
    for deltas, result in found:
        certain = joined(deltas, 0)
        assert certain == result.sequences[0].tokens[: len(certain)]
        assert {delta.index for delta in deltas} <= {0}
    assert "do_sample" in options or any(deltas for deltas, _ in found)  # drawn beams may have little in common


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"num_beams": 1}, ONE), ({"num_beams": 1}, SOME), ({"num_beams": 3}, SOME),
        ({"num_beams": 1, "do_sample": True, "num_return_sequences": 2}, ONE),
    ],
    ids=["greedy-one", "greedy-some", "beams", "several"],
)  # fmt: skip
def test_a_stop_text_ends_sequences_where_the_librarys_does(
    model: LocalModel, options: dict[str, Any], stops: tuple[str, ...]
) -> None:
    chosen = [job for number, job in enumerate(jobs(model, **options)) if number in (0, 2, 5, 7)]
    wanted = [Generate(job.tokens, job.options, job.seed, stops, streams=True) for job in chosen]
    has_stopped, reference = False, model._worker._runner._model
    for job, (deltas, result) in zip(wanted, run(model, wanted), strict=True):
        expected = of_job(reference, job, stop_strings=list(stops), tokenizer=model.tokenizer)
        for index, (sequence, (tokens, _)) in enumerate(zip(result.sequences, expected, strict=True)):
            assert sequence.tokens == tokens
            certain = joined(deltas, index)
            assert certain == tokens[: len(certain)] and (job.options["num_beams"] > 1 or certain == tokens)
            is_stopped = any(stop in f" {model.tokenizer.decode(tokens)}" for stop in stops)
            has_stopped |= is_stopped
            assert sequence.finish_reason == ("stop" if is_stopped or len(tokens) < 24 else "length")
            assert sequence.generated == len(tokens) + (not is_stopped and len(tokens) < 24)
    assert has_stopped


async def test_scores_that_are_not_numbers_fail() -> None:
    """JSON has no NaN. A request that returns no scores has its tokens, as `generate` chooses them."""
    with closing(LocalModel("m", ServeSettings(models=(("m", GPT2),), warm_up=False))) as made:
        runner: Any = made._worker._runner
        with torch.no_grad():
            runner._model.get_output_embeddings().weight[5] = torch.nan
        greedy = Generate(jobs(made)[0].tokens, {"num_beams": 1, "max_new_tokens": 12})
        beams, drawn = ({**greedy.options, "num_beams": 3}, {**greedy.options, "do_sample": True})
        for job in (replace(greedy, logprobs=2), replace(greedy, options=beams), replace(greedy, options=drawn)):
            with pytest.raises(Failed, match="not numbers"):
                await made.generate(job)
            with pytest.raises(Failed, match="not numbers"):
                await streamed(made, replace(job, streams=True))
        assert len((await made.generate(greedy)).sequences) == 1


def test_a_stop_text_is_new(model: LocalModel) -> None:
    tokens = tuple(model.tokenizer("the lord said the lord", add_special_tokens=False).input_ids)
    row, twice = torch.tensor([tokens]), torch.tensor([[*tokens, *tokens]])

    def ends(stop: str, prompt: int, rows: torch.Tensor = row) -> bool:
        return bool(StopTexts(model.tokenizer, (stop,), prompt)(rows, None))

    assert ends("the lord", 0) and ends("the lord", len(tokens), twice)
    assert not ends("the lord", len(tokens) - 1), "it has begun in the prompt"
    assert ends(model.tokenizer.decode(tokens[-1:]), len(tokens) - 1)


# ---- without a model


def test_behind_the_beams_a_candidate_that_ends_is_no_result() -> None:
    told: list[int] = []
    watcher = BeamWatcher(0, 1, Ends(frozenset({9})), lambda delta: told.extend(delta.tokens))
    watcher(torch.tensor([[5], [9]]), None)
    watcher(torch.tensor([[5, 1], [5, 2]]), None)
    assert told == [5]


def test_a_call_that_begins_again_tells_nothing_twice() -> None:
    told: list[Delta] = []
    watcher = RowWatcher(1, Ends(frozenset({9})), told.append, None)
    for rows in ([[0, 5], [0, 6]], [[0, 5], [0, 6]], [[0, 5, 9], [0, 6, 7]], [[0, 5, 9, 1], [0, 6, 7, 8]]):
        watcher(torch.tensor(rows), None)
    assert joined(told, 0) == (5,) and joined(told, 1) == (6, 7, 8)
