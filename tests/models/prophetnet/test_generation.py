"""Generation of ProphetNet with FastGen and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGeneratorWithAlignment

import fastgen
from fastgen.models.prophetnet.model import ProphetNetDecoder
from tests.fairseq.check import accelerated, check, fallbacks
from tests.fairseq.test_generate import OPTIONS, generator_for
from tests.models.prophetnet.reference import Reference
from tests.models.prophetnet.tiny import PAD, SEP, VARIANTS, arguments, model_of, rows, sources


@pytest.fixture(scope="module")
def pool() -> dict[str, Any]:
    return {name: model_of(arguments(**changes), seed=2) for name, changes in VARIANTS.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_hypotheses_are_the_same(pool, strict, options):
    check(lambda: generator_for([pool["two streams"]], **options), sources(5))
    assert accelerated() == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 5), (7, 40), (3, 90)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_and_sources_of_all_shapes(pool, strict, variant, shape):
    check(lambda: generator_for([pool[variant]], beam_size=4, max_len_b=40), sources(*shape, left_pad=False))
    assert accelerated() == 1


def test_ensembles_prefixes_and_half_precision(pool, strict):
    pair = [pool["two streams"], pool["three streams"]]
    check(lambda: generator_for(pair, beam_size=4), sources(5, 50))
    check(
        lambda: generator_for(pair[:1], beam_size=3), sources(3), prefix_tokens=torch.tensor([[5, 6], [7, 2], [8, 0]])
    )
    half = model_of(arguments()).bfloat16()
    assert len(generator_for([half], beam_size=2).generate([], sources(3, 40))) == 3
    assert accelerated() == 3


@torch.no_grad()
def test_attention_to_the_source_is_that_of_the_stream_of_the_next_token(strict):
    args = arguments()
    model = model_of(args)
    plain = generator_for([model], beam_size=3).generate([], sources(3))
    assert plain[0][0]["attention"].numel() == 0  # as with the authors' code, only when asked for
    model.make_generation_fast_(need_attn=True)
    sample = sources(3, left_pad=False)
    found = check(lambda: generator_for([model], SequenceGeneratorWithAlignment, beam_size=3), sample)
    reference = Reference(model.state_dict(), args, PAD)
    for source, hypotheses in zip(rows(sample["net_input"]["src_tokens"]), found, strict=True):
        tokens = hypotheses[0]["tokens"].tolist()
        _, expected = reference.decode_and_look(reference.encode(source), [SEP, *tokens[:-1]])
        have = hypotheses[0]["attention"][: len(source)]
        torch.testing.assert_close(have, expected.T, atol=1e-4, rtol=1e-4)


def test_one_predicting_stream_is_computed_in_a_step():
    model = model_of(arguments(ngram=3))
    encoded = model.encoder(**sources(2)["net_input"])
    seen = []
    model.decoder.layers[0].register_forward_hook(lambda layer, args, output: seen.append(args[0].shape[0]))
    model.decoder(torch.full((2, 1), 9), encoded, incremental_state={})
    model.decoder(torch.full((2, 5), 9), encoded)
    assert seen == [2, 4 * 5]  # the main stream and one besides it, against all for all positions


class OwnDecoder(ProphetNetDecoder):
    def extract_features(self, *args: Any, **kwargs: Any) -> Any:
        return super().extract_features(*args, **kwargs)


def test_what_is_not_known_falls_back():
    model = model_of(arguments())
    model.decoder.__class__ = OwnDecoder
    check(lambda: generator_for([model], beam_size=2), sources(2))
    assert not accelerated() and fallbacks() == {"OwnDecoder has a extract_features of its own": 1}
    fastgen.reset_stats()
    model.decoder.__class__ = ProphetNetDecoder
    attention_ = model.decoder.layers[1].ngram_self_attn
    attention_.extend = lambda *args, original=attention_.extend: original(*args)
    generator_for([model], beam_size=2).generate([], sources(2))
    assert fallbacks() == {"attention of type NgramSelfAttention": 1}
