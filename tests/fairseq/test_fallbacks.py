"""What FastGen does not accelerate runs on FairSeq's own code, with the reason counted; failures are repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.iterative_refinement_generator import IterativeRefinementGenerator
from fairseq.modules import MultiheadAttention
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator

import fastgen
from fastgen import patching
from fastgen.optimizer.fairseq.call import Call
from tests.equivalence.check import in_threads
from tests.fairseq import models
from tests.fairseq.check import accelerated, assert_same, check, fallbacks
from tests.fairseq.test_generate import generator_for


def falls_back(make: Any, reason: str, **arguments: Any) -> None:
    """Asserts that the result is FairSeq's, the reason counted, and that strict mode raises it."""
    check(make, models.sources(4), **arguments)
    assert accelerated() == 0
    assert [reason in found for found in fallbacks()] == [True], fallbacks()
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match="fairseq.generate"):
        make().generate([], models.sources(4), **arguments)


def test_models_that_edit_have_a_generator_of_their_own():
    model = models.levenshtein()
    generator = IterativeRefinementGenerator(model.decoder.dictionary, max_iter=5)

    def run() -> Any:
        torch.manual_seed(0)
        return generator.generate([model], models.sources(4))

    with fastgen.disabled():
        original = run()
    found = run()
    assert [each[0]["tokens"].tolist() for each in found] == [each[0]["tokens"].tolist() for each in original]
    assert any(len(each[0]["tokens"]) > 2 for each in found) and fastgen.stats() == {}


def generator_for_any(*members: Any, max_len_b: int = 10, **options: Any) -> Any:
    return SequenceGenerator(list(members), members[0].decoder.dictionary, beam_size=3, max_len_b=max_len_b, **options)


class OtherAttention(MultiheadAttention):
    pass


class OtherSearch(search.BeamSearch):
    pass


class OtherEnsemble(EnsembleModel):
    pass


def _with_other_ensemble() -> Any:
    model = models.encoder_decoder()
    return SequenceGenerator(OtherEnsemble([model]), model.decoder.dictionary, beam_size=3, max_len_b=10)


def _with_other_search() -> Any:
    model = models.encoder_decoder()
    return generator_for_any(model, search_strategy=OtherSearch(model.decoder.dictionary))


def _changed(change: Callable[[Any], object]) -> Callable[[], Any]:
    def make() -> Any:
        model = models.encoder_decoder()
        change(model)
        return generator_for_any(model)

    return make


def _retain_dropout(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "apply_during_inference"):
            module.apply_during_inference = True


def _replace_forward(layer: Any) -> None:
    layer.forward = lambda *args, forward=layer.forward, **kwargs: forward(*args, **kwargs)


CASES: dict[str, Callable[[], Any]] = {
    "LSTMDecoder is not a Transformer decoder": lambda: generator_for_any(models.lstm_model()),
    "FConvDecoder is not a Transformer decoder": lambda: generator_for_any(models.convolutional()),
    "LSTMDecoder": lambda: generator_for_any(models.encoder_decoder(), models.lstm_model()),
    "dropout is retained": _changed(_retain_dropout),
    "self-attention over the source": lambda: generator_for_any(
        models.encoder_decoder(no_cross_attention=True, cross_self_attention=True)
    ),
    "forward hooks": _changed(lambda model: model.decoder.layers[0].register_forward_hook(lambda *given: None)),
    "a forward pass of its own": _changed(lambda model: _replace_forward(model.decoder.layers[1])),
    "attention of type OtherAttention": _changed(
        lambda model: setattr(model.decoder.layers[0].encoder_attn, "__class__", OtherAttention)
    ),
    "one of the library's": _with_other_search,
    "the ensemble is a OtherEnsemble": _with_other_ensemble,
}


@pytest.mark.parametrize("reason", CASES)
def test_reason(reason):
    falls_back(CASES[reason], reason)


def test_sequences_that_begin_with_padding():
    generator = generator_for_any(models.encoder_decoder())
    # Attention over nothing but padding has no result, and FairSeq's loop stops at that.
    with pytest.raises(AssertionError):
        generator.generate([], models.sources(2), bos_token=1)
    assert list(fallbacks()) == ["sequences that begin with padding"]


def test_a_model_set_to_another_beam_size():
    model = models.encoder_decoder()
    one = generator_for([model], beam_size=1)
    generator_for([model], beam_size=2)
    # FairSeq's own code takes every second source for the one before it.
    falls_back(lambda: one, "another beam size")


def test_recording_gradients():
    generator = generator_for_any(models.encoder_decoder())
    with torch.enable_grad():
        generator._generate(models.sources(2))
    assert list(fallbacks()) == ["gradients are recorded"]


def test_a_scripted_generator_is_fairseqs():
    generator = generator_for_any(models.encoder_decoder())
    scripted = torch.jit.script(generator)
    sample = models.sources(3)
    ours = generator.generate([], sample)
    assert accelerated() == 1
    assert_same(scripted({"net_input": sample["net_input"]}), ours)
    assert accelerated() == 1 and not fallbacks()


@pytest.mark.parametrize("make", [models.encoder_decoder, models.bart_model])
def test_a_scripted_model_is_fairseqs(make):
    model = make()
    scripted = torch.jit.script(model)
    inputs = models.sources(3)["net_input"]
    previous = torch.tensor([[2, 5, 6], [2, 7, 8], [2, 9, 10]])
    with torch.no_grad():
        found, expected = (each(**inputs, prev_output_tokens=previous)[0] for each in (scripted, model))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    check(lambda: generator_for_any(model), models.sources(3))
    assert accelerated() == 1


def test_a_failure_is_repeated_with_fairseqs_code_from_the_same_random_state(monkeypatch):
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise IndexError("planted")
        return own(*args)

    own = Call.extend
    monkeypatch.setattr(Call, "extend", failing)

    def make() -> Any:
        calls.clear()
        model = models.encoder_decoder()
        return generator_for([model], beam_size=3, _search=lambda words: search.Sampling(words, sampling_topk=10))

    with pytest.warns(RuntimeWarning, match="planted"):
        check(make, models.sources(4))
    assert list(fallbacks()) == ["IndexError in the accelerated call: planted"]
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match="planted"):
        make().generate([], models.sources(4))


def test_what_fairseq_raises_is_raised_and_not_reported(recwarn):
    generator = SequenceGenerator([models.encoder_decoder()], models.dictionary(), beam_size=3, min_len=9, max_len_b=3)
    with pytest.raises(AssertionError, match="min_len"):
        generator.generate([], models.sources(2))
    assert not fallbacks() and not [w for w in recwarn if "FastGen" in str(w.message)]


def test_a_source_of_nothing_but_padding():
    sample = models.sources(3)
    sample["net_input"]["src_tokens"][1] = 1
    with pytest.raises(AssertionError):
        generator_for_any(models.encoder_decoder()).generate([], sample)
    assert list(fallbacks()) == ["a source that is nothing but padding"]


def test_a_hook_that_is_missing_means_that_nothing_is_accelerated(monkeypatch):
    monkeypatch.setattr(
        EnsembleModel, "reorder_encoder_out", patching.original_of(vars(EnsembleModel)["reorder_encoder_out"])
    )
    falls_back(lambda: generator_for_any(models.encoder_decoder()), "EnsembleModel.reorder_encoder_out is not hooked")


def test_a_generator_inside_a_generator():
    """A search that generates itself: what is not accelerated must not meet the K/V of the call around it."""
    inner = generator_for_any(models.encoder_decoder(seed=1), max_len_b=3)
    lstm = generator_for_any(models.lstm_model(), max_len_b=3)
    words = models.dictionary()
    model = models.encoder_decoder()
    model.decoder.set_beam_size(2)
    same = SequenceGenerator([model], words, beam_size=2, max_len_b=5)
    with fastgen.disabled():
        expected = same.generate([], models.sources(3))

    def allowed(batch: int, tokens: Any) -> list[int]:
        with fastgen.disabled():
            assert_same(expected, same.generate([], models.sources(3)))
        for generator in (inner, lstm):
            generator.generate([], models.sources(1, 5))
        return list(range(2, 40))

    check(
        lambda: SequenceGenerator(
            [model], words, beam_size=2, max_len_b=2,
            search_strategy=search.PrefixConstrainedBeamSearch(words, allowed),
        ),
        models.sources(2),
    )  # fmt: skip
    assert accelerated() > 1 and list(fallbacks()) == ["LSTMDecoder is not a Transformer decoder"]


def test_threads_do_not_meet():
    generators = [generator_for_any(models.encoder_decoder(seed=seed)) for seed in range(3)]
    with fastgen.disabled():
        expected = [generator.generate([], models.sources(4)) for generator in generators]
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        for _ in range(3):
            results[index] = generators[index].generate([], models.sources(4))

    in_threads(work, 3)
    for index, want in enumerate(expected):
        assert_same(want, results[index])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_ngrams_are_blocked_as_fairseq_blocks_them(n, spare):
    """Its code looks at the last columns of the tokens, whether something has been generated there or not."""
    blocker = NGramRepeatBlock(n, use_extension=False)
    for step in range(9):
        tokens = torch.randint(4, 7, (6, step + 1 + spare))
        tokens[:, step + 1 :] = torch.randint(1, 5, (6, spare))
        scores = torch.randn(6, 9)
        with fastgen.disabled():
            original = blocker(tokens, scores.clone(), 2, 3, step)
        assert torch.equal(blocker(tokens, scores, 2, 3, step), original)
    counts = fastgen.stats()["fairseq.no_repeat_ngram"]
    assert (counts["accelerated"] > 0) == (n > 1) and counts["fallback"].get("n-grams of one token", 0) == 9 * (n == 1)
