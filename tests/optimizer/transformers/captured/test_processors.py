"""Captured processors: the library's results at every length, as a replay sees it, and without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as library

import fastgen
from fastgen.decoding.captured.capturable import capturable
from fastgen.decoding.captured.recording import record
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers.captured.processors import Lengths, Signed, of_rows, signed, with_temperature
from fastgen.optimizer.transformers.captured.rewritten_processors import Bucket, StepTokens
from tests.equivalence.models import BY_NAME

VOCABULARY = 19
CAPACITY = 24
CPU = torch.device("cpu")


class Call(NamedTuple):
    """A call of `generate`: its sizes, and its tokens, of which there are few, so that they repeat."""

    prompt: int = 3
    limit: int = 12
    start: int = 0
    inputs: int = 2
    beams: int = 3
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.inputs * self.beams

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.prompt, self.limit)

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 5, (self.rows, self.limit), generator=generator)

    def encoder_tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(0, 8, (self.inputs, 7 + self.seed), generator=generator)

    def padding(self) -> Tensor:
        return torch.arange(self.rows) % (self.prompt + 2)


# Each makes the processor that `generate` would make for a call; or, at the end, one that a user may have made.
PROCESSORS: dict[str, Callable[[Call], Any]] = {
    "min_length": lambda call: library.MinLengthLogitsProcessor(6, torch.tensor([2, 1, 40, -1])),
    "min_new_tokens": lambda call: library.MinNewTokensLengthLogitsProcessor(call.prompt, 4, 2),
    "min_new_tokens_of_more": lambda call: library.MinNewTokensLengthLogitsProcessor(call.prompt + 2, 3, [2, 3]),
    "forced_bos": lambda call: library.ForcedBOSTokenLogitsProcessor(4),
    "forced_eos": lambda call: library.ForcedEOSTokenLogitsProcessor(call.limit, [2, 5]),
    "forced_eos_before": lambda call: library.ForcedEOSTokenLogitsProcessor(call.limit - 3, 2),
    "suppress": lambda call: library.SuppressTokensLogitsProcessor([3, 1, 3, -1, 40]),
    "suppress_none": lambda call: library.SuppressTokensLogitsProcessor([]),
    "suppress_at_begin": lambda call: library.SuppressTokensAtBeginLogitsProcessor([3, 1, 40], call.prompt),
    "suppress_after_begin": lambda call: library.SuppressTokensAtBeginLogitsProcessor([3], call.prompt + 1),
    "repetition": lambda call: library.RepetitionPenaltyLogitsProcessor(1.3),
    "no_repeat_1": lambda call: library.NoRepeatNGramLogitsProcessor(1),
    "no_repeat_2": lambda call: library.NoRepeatNGramLogitsProcessor(2),
    "no_repeat_4": lambda call: library.NoRepeatNGramLogitsProcessor(4),
    "encoder_no_repeat_1": lambda call: library.EncoderNoRepeatNGramLogitsProcessor(1, call.encoder_tokens()),
    "encoder_no_repeat_2": lambda call: library.EncoderNoRepeatNGramLogitsProcessor(2, call.encoder_tokens()),
    "encoder_no_repeat_3": lambda call: library.EncoderNoRepeatNGramLogitsProcessor(3, call.encoder_tokens()),
    "bad_words": lambda call: library.NoBadWordsLogitsProcessor(
        [[7], [1, 2], [2, 2], [3, 2], [0, 1, 2], [4, 4, 4, 4], [2]], torch.tensor([2])
    ),
    "no_bad_words": lambda call: library.NoBadWordsLogitsProcessor([[2]], torch.tensor([2])),
    "sequence_bias": lambda call: library.SequenceBiasLogitsProcessor(
        {(7,): -1.3, (0, 1, 2): 0.1, (1, 2): 0.7, (3, 1, 2): 1e8, (1, 1, 2): -1e8, (2, 2): 0.7, (1, 2, 2): 3.3,
         (4, 4, 4, 4): -math.inf, (2,): 0.2}
    ),
    "one_bias": lambda call: library.SequenceBiasLogitsProcessor([[[3, 4], 2.5]]),
    "temperature": lambda call: library.TemperatureLogitsWarper(0.7),
    "top_k": lambda call: library.TopKLogitsWarper(4, min_tokens_to_keep=2),
    "top_k_all": lambda call: library.TopKLogitsWarper(100),
    "top_k_of_any_vocabulary": lambda call: library.TopKLogitsWarper(2**70),
    "top_p": lambda call: library.TopPLogitsWarper(0.8, min_tokens_to_keep=2),
    "min_p": lambda call: library.MinPLogitsWarper(0.1, filter_value=-50.0),
    "typical": lambda call: library.TypicalLogitsWarper(0.6),
    "epsilon": lambda call: library.EpsilonLogitsWarper(0.05, min_tokens_to_keep=2),
    "inf_nan": lambda call: library.InfNanRemoveLogitsProcessor(),
    "normalise": lambda call: library.LogitNormalization(),
}  # fmt: skip
try:
    library.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([0]))
except ValueError:
    pass  # a number of each row came later
else:
    PROCESSORS["repetition_padded"] = lambda call: library.RepetitionPenaltyLogitsProcessor(1.3, call.padding())


def _bucket(call: Call | None = None) -> Bucket:
    call = call or FIRST
    return Bucket(CPU, call.inputs, call.beams, VOCABULARY)


def known(processor: Any, lengths: Lengths) -> Signed:
    found = signed(processor, lengths)
    assert found is not None
    return found


def captured(processor: Any, bucket: Bucket, lengths: Lengths) -> Any:
    return known(processor, lengths).made(bucket)


def signature(processor: Any, lengths: Lengths) -> Any:
    return known(processor, lengths).signature


def refresh(made: Any, processor: Any, lengths: Lengths) -> bool:
    return known(processor, lengths).refresh(made)


FIRST = Call()
# What the graph of the first call serves, and what needs one of its own.
ALIKE = (Call(start=5, seed=1), Call(prompt=8, limit=17, start=2, seed=2))
CALLS = (Call(inputs=1, beams=1), Call(prompt=1), Call(inputs=3, beams=2, seed=3))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Step:
    """A step's tensors, changed in place as between replays."""

    def __init__(self, rows: int) -> None:
        self.tensors = StepTokens(
            torch.zeros(rows, CAPACITY, dtype=torch.int64), *(torch.tensor(0, dtype=torch.int64) for _ in range(4))
        )

    def set(self, call: Call, length: int) -> StepTokens:
        """At a length of the running sequences, as the library counts it."""
        tokens, start, end, prompt, limit = self.tensors
        tokens[:, : call.start] = -1
        tokens[:, call.start : call.start + length] = call.tokens()[:, :length]
        tokens[:, call.start + length :] = torch.arange(CAPACITY - call.start - length) % 5  # nothing of it counts
        start.fill_(call.start)
        end.fill_(call.start + length)
        prompt.fill_(call.start + call.prompt)
        limit.fill_(call.limit)
        return self.tensors


def scores_of(rows: int, seed: int) -> Tensor:
    """Positive and negative ones, some of them equal, some -inf."""
    scores = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    scores = torch.where(scores.abs() < 1.5, scores.round(), scores)
    scores[:, 3::7] = -math.inf
    if seed % 3 == 0:
        scores[::2, 2] = -math.inf  # the end
    return scores


def expected_of(processor: Any, call: Call, length: int, scores: Tensor) -> Tensor:
    """The library's result for the first rows of a call, which there are scores of."""
    with fastgen.disabled():
        return processor(call.tokens()[: len(scores), :length], scores.clone())


def _check_every_length(made: Any, processor: Any, call: Call, step: Step) -> None:
    for length in range(call.prompt, call.limit):
        scores = scores_of(call.rows, seed=length)
        expected = expected_of(processor, call, length, scores)
        result = made(scores.clone(), step.set(call, length))
        torch.testing.assert_close(
            result, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=length: f"{call}, {n}: {m}"
        )


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_length(name: str) -> None:
    for call in CALLS:
        processor = PROCESSORS[name](call)
        made = captured(processor, _bucket(call), call.lengths)
        _check_every_length(made, processor, call, Step(call.rows))


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_graph_serves_other_calls(name: str) -> None:
    """Other lengths of prompt and output, another filling, other tokens of the encoder: the same signature."""
    first = PROCESSORS[name](FIRST)
    made = captured(first, _bucket(), FIRST.lengths)
    step = Step(FIRST.rows)
    _check_every_length(made, first, FIRST, step)
    frozen = signature(first, FIRST.lengths)
    for call in (*ALIKE, FIRST):
        other, lengths = PROCESSORS[name](call), call.lengths
        assert frozen is not None and frozen == signature(other, lengths)
        hash(frozen)
        assert refresh(made, other, lengths)
        _check_every_length(made, other, call, step)


@pytest.mark.parametrize("name", PROCESSORS)
def test_nothing_waits_and_constants_are_on_the_device(name: str) -> None:
    """A recording refuses what a GPU could not capture. On a device without values, whatever needs one raises, and so
    do operands from elsewhere.
    """
    call, meta = Call(start=5), torch.device("meta")
    step, scores = Step(call.rows).set(call, 6), scores_of(call.rows, seed=1)
    made = captured(PROCESSORS[name](call), _bucket(call), call.lengths)
    record(capturable(lambda: made(scores, step)))
    on_device = captured(PROCESSORS[name](call), _bucket(call)._replace(device=meta), call.lengths)
    result = on_device(scores.to(meta), StepTokens(*(tensor.to(meta) for tensor in step)))
    assert result.device == meta and result.shape == (call.rows, VOCABULARY)


@pytest.mark.parametrize("name", sorted({"encoder_no_repeat_2", "repetition_padded"} & PROCESSORS.keys()))
def test_a_bucket_has_rows_that_no_input_has(name: str) -> None:
    call, wide = Call(inputs=3, beams=2), Call(inputs=4, beams=2)
    processor, step = PROCESSORS[name](call), Step(wide.rows)
    made = captured(processor, _bucket(wide), call.lengths)
    for length in range(call.prompt, call.limit):
        scores = scores_of(wide.rows, seed=length)
        expected = expected_of(processor, wide, length, scores[: call.rows])
        result = made(scores.clone(), step.set(wide, length))
        torch.testing.assert_close(result[: call.rows], expected, rtol=0, atol=0, equal_nan=True)


def test_ranks_are_in_the_librarys_order() -> None:
    options = {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]], "min_length": 5,
        "forced_bos_token_id": 3, "forced_eos_token_id": 1, "remove_invalid_values": True, "suppress_tokens": [6],
        "begin_suppress_tokens": [7], "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
        "typical_p": 0.5, "epsilon_cutoff": 0.1, "renormalize_logits": True,
    }  # fmt: skip
    model = BY_NAME["bart"].build()
    config, _ = model._prepare_generation_config(None, **options)
    model._prepare_special_tokens(config, True, device=CPU)
    tokens = torch.ones(1, 4, dtype=torch.long)
    made = model._get_logits_processor(
        config, input_ids_seq_length=4, encoder_input_ids=tokens, device=CPU, model_kwargs={}
    )
    ranks = [known(each, Lengths(4, 12)).rank for each in made]
    assert len(ranks) > len(options) - 3
    assert ranks == sorted(set(ranks)), "each has one of its own"


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    call = FIRST
    make = PROCESSORS["encoder_no_repeat_2"]
    processor = make(call)
    made = captured(processor, _bucket(call), call.lengths)
    assert not refresh(made, make(call._replace(inputs=call.inputs + 1)), call.lengths)
    _check_every_length(made, processor, call, Step(call.rows))


@pytest.mark.parametrize("name", ["temperature", "top_k", "repetition", "no_repeat_2"])
def test_one_whose_code_was_exchanged_is_the_librarys_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, lengths = PROCESSORS[name](FIRST), FIRST.lengths
    assert signed(processor, lengths) is not None and len(with_temperature([processor])) == 1 + (name != "temperature")
    monkeypatch.setattr(type(processor), "__call__", lambda self, tokens, scores: scores)
    assert signed(processor, lengths) is None
    given = [processor]
    assert with_temperature(given) is given


class AnyOrder(TorchDispatchMode):
    """Adds up the rows of one call in the reverse of their order, as a GPU may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            sums, dim, index, source = args
            args = (sums, dim, index.flip(0), source.flip(dim))
        return func(*args, **(kwargs or {}))


def test_sums_do_not_depend_on_the_order_of_additions() -> None:
    """Of several sequences with the same last token, the numbers are added in the library's order."""
    biases = {(0, 2): 0.1, (1, 0, 2): 1e8, (1, 1, 2): -1e8, (4, 1, 0, 2): -1e8, (3, 1, 0, 2): 0.3, (0, 0, 2): 0.3}
    processor = library.SequenceBiasLogitsProcessor(biases)
    made = captured(processor, _bucket(), Lengths(4, 12))
    tokens = torch.tensor([[0, 4, 1, 0], [0, 3, 1, 0], [0, 1, 0, 0]])
    step = Step(3).tensors
    step.tokens[:, :4] = tokens
    step.length.fill_(4)
    with fastgen.disabled():
        expected = processor(tokens, scores_of(3, seed=1))
    with AnyOrder():
        result = made(scores_of(3, seed=1), step)
    assert torch.equal(result, expected)


def test_tokens_that_the_scores_lack() -> None:
    """A model's input vocabulary may be the larger one. Such tokens repeat nothing that can come."""
    step = Step(1).tensors
    step.tokens[0, :6] = torch.tensor([1, VOCABULARY, 3, VOCABULARY + 5, 1, VOCABULARY])
    step.length.fill_(6)
    for processor, known in (
        (library.RepetitionPenaltyLogitsProcessor(1.3), [1, 3]),
        (library.NoRepeatNGramLogitsProcessor(1), [1, 3]),
    ):
        made = captured(processor, _bucket(), Lengths(1, 12))
        with fastgen.disabled():
            expected = processor(torch.tensor([known]), scores_of(1, seed=1))
        assert torch.equal(made(scores_of(1, seed=1), step), expected)


class Derived(library.MinLengthLogitsProcessor):
    pass


def _with(processor: Any, **attributes: Any) -> Any:
    vars(processor).update(attributes)
    return processor


def _without(processor: Any, attribute: str) -> Any:
    delattr(processor, attribute)
    return processor


@pytest.mark.parametrize(
    "processor",
    [
        Derived(3, 2),
        lambda tokens, scores: scores,
        library.PrefixConstrainedLogitsProcessor(lambda batch, tokens: [1], 1),
        _with(library.MinLengthLogitsProcessor(3, 2), min_length=torch.tensor(3)),
        _with(library.MinLengthLogitsProcessor(3, 2), of_a_later_release=1),
        _without(library.TopPLogitsWarper(0.9), "filter_value"),
        library.ForcedBOSTokenLogitsProcessor([1, 2]),
        library.ForcedEOSTokenLogitsProcessor(None, 2),
        library.SuppressTokensLogitsProcessor([1.0]),
        _with(library.RepetitionPenaltyLogitsProcessor(1.3), logits_indices=torch.tensor([0])),
        library.RepetitionPenaltyLogitsProcessor(1.3, 3),
        library.ExponentialDecayLengthPenalty((2, 1.1), 2, 3),
        library.EncoderRepetitionPenaltyLogitsProcessor(1.3, torch.tensor([[1, 2]])),
        library.EtaLogitsWarper(0.2),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_others_are_not_captured(processor: Any) -> None:
    assert signed(processor, Lengths(3, 12)) is None


def test_a_penalty_for_other_rows_is_for_the_library_to_refuse() -> None:
    if "repetition_padded" in PROCESSORS:
        processor = PROCESSORS["repetition_padded"](FIRST)
        assert signed(processor, Lengths(3, 12, rows=FIRST.rows)) is not None
        assert signed(processor, Lengths(3, 12, rows=FIRST.rows + 1)) is None


def test_processors_of_one_signature_differ_in_their_data() -> None:
    """What is captured of one does what another one does once it has that one's data."""
    lengths = FIRST.lengths
    alike: dict[Any, list[Any]] = {}
    for make in PROCESSORS.values():
        processor = make(FIRST)
        alike.setdefault(signature(processor, lengths), []).append(processor)
    pairs = [(one, other) for found in alike.values() for one in found for other in found if one is not other]
    assert len(pairs) >= 8
    for one, other in pairs:
        made = captured(one, _bucket(), lengths)
        assert refresh(made, other, lengths)
        _check_every_length(made, other, FIRST, Step(FIRST.rows))


def test_what_follows_the_lengths_of_a_call_is_data() -> None:
    fixed = library.SuppressTokensAtBeginLogitsProcessor([3], 5)
    assert signature(fixed, Lengths(5, 12)) == signature(fixed, Lengths(4, 12))
    forced = library.ForcedEOSTokenLogitsProcessor(12, 2)
    assert signature(forced, Lengths(5, 12)) == signature(forced, Lengths(5, 13))
    warm, cold = library.TemperatureLogitsWarper(0.7), library.TemperatureLogitsWarper(0.2)
    assert signature(warm, Lengths(5, 12)) == signature(cold, Lengths(5, 12))
    assert signature(warm, Lengths(5, 12, freezes=True)) != signature(cold, Lengths(5, 12, freezes=True))


@pytest.mark.parametrize(
    "processor",
    [library.ForcedBOSTokenLogitsProcessor(VOCABULARY), library.ForcedEOSTokenLogitsProcessor(12, [2, VOCABULARY])],
    ids=lambda processor: type(processor).__name__,
)
def test_tokens_outside_the_vocabulary_are_for_the_library_to_refuse(processor: Any) -> None:
    with pytest.raises(CannotBeCaptured, match="does not fit"):
        captured(processor, _bucket(), FIRST.lengths)
    assert captured(processor, _bucket()._replace(vocabulary=VOCABULARY + 1), FIRST.lengths)


def test_a_bias_outside_the_vocabulary() -> None:
    processor = library.SequenceBiasLogitsProcessor([[[VOCABULARY, 1], 1.0]])
    made = captured(processor, _bucket(), FIRST.lengths)
    with pytest.raises((IndexError, ValueError), match=f"token {VOCABULARY}"):
        made(scores_of(FIRST.rows, seed=1), Step(FIRST.rows).set(FIRST, 3))


def test_processors_of_some_rows() -> None:
    given = [
        library.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([3, 0, 5])),
        library.RepetitionPenaltyLogitsProcessor(1.2, 2),
        library.NoRepeatNGramLogitsProcessor(2),
    ]
    found = of_rows(given, torch.tensor([0, 2]))
    assert found[0].prompt_ignore_length.tolist() == [3, 5] and given[0].prompt_ignore_length.tolist() == [3, 0, 5]
    assert found[1:] == given[1:]
