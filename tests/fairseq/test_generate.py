"""What encoder-decoder models generate with FastGen and without it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.data import encoders  # noqa: F401  (as the command lines do)
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment

from fastgen.decoding.kv import growing as kv
from fastgen.decoding.kv.view import KVView
from fastgen.optimizer.fairseq.call import Call
from fastgen.optimizer.fairseq.hooks import step
from tests.fairseq import models
from tests.fairseq.check import accelerated, check

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(6)]

# Options of SequenceGenerator. Those that begin with an underscore are made by `generator_for`.
OPTIONS: dict[str, dict[str, Any]] = {
    "beam 4": {"beam_size": 4},
    "beam 1": {"beam_size": 1},
    "beam 5, long": {"beam_size": 5, "max_len_b": 60},
    "length penalty": {"beam_size": 4, "len_penalty": 0.3},
    "no normalisation": {"beam_size": 4, "normalize_scores": False},
    "unk penalty": {"beam_size": 4, "unk_penalty": 3.0},
    "unk reward": {"beam_size": 4, "unk_penalty": -4.0},
    "temperature": {"beam_size": 4, "temperature": 0.6},
    "minimum length": {"beam_size": 4, "min_len": 6},
    "maximum length": {"beam_size": 4, "max_len_a": 0.5, "max_len_b": 2},
    "of the source's length": {"beam_size": 4, "match_source_len": True},
    "no repeated 2-gram": {"beam_size": 4, "no_repeat_ngram_size": 2},
    "no repeated 3-gram": {"beam_size": 4, "no_repeat_ngram_size": 3},
    "suppressed": {"beam_size": 4, "tokens_to_suppress": ("w3", "w14", "w26", "w39")},
    "stripped": {"beam_size": 4, "symbols_to_strip_from_output": {7, 8}},
    "other end": {"beam_size": 3, "eos": 9},
    "sampling": {"beam_size": 3, "_search": lambda words: search.Sampling(words)},
    "top-k": {"beam_size": 3, "_search": lambda words: search.Sampling(words, sampling_topk=5)},
    "top-p": {"beam_size": 3, "_search": lambda words: search.Sampling(words, sampling_topp=0.8)},
    "one sample": {"beam_size": 1, "_search": lambda words: search.Sampling(words, sampling_topk=10)},
    "diverse beam": {"beam_size": 4, "_search": lambda words: search.DiverseBeamSearch(words, 2, 0.5)},
    "diverse siblings": {"beam_size": 4, "_search": lambda words: search.DiverseSiblingsSearch(words, 0.3)},
    "constrained length": {
        "beam_size": 4,
        "_search": lambda words: search.LengthConstrainedBeamSearch(words, 0.2, 2, 0.7, 3),
    },
    "allowed tokens": {
        "beam_size": 3,
        "_search": lambda words: search.PrefixConstrainedBeamSearch(
            words, lambda batch, tokens: [2, *range(4 + (int(tokens[-1]) + batch) % 7, 50, 2)]
        ),
    },
}


def generator_for(members: list[Any], kind: Any = SequenceGenerator, **options: Any) -> Any:
    """A generator of these models, whose beam size the library leaves as the last generator set it when it is 1."""
    words = members[0].decoder.dictionary
    for model in members:
        model.decoder.set_beam_size(options.get("beam_size", 1))
    options = {"max_len_b": 12, **options}
    make_search = options.pop("_search", None)
    if make_search is not None:
        options["search_strategy"] = make_search(words)
    return kind(members, words, **options)


@functools.cache
def pool(name: str, seed: int = 0) -> Any:
    """Models by name and seed, made once."""
    return {**models.SEQ2SEQ, "lm": models.language_model}[name](seed=seed)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", models.SEQ2SEQ)
def test_hypotheses_are_the_same(name, options):
    check(lambda: generator_for([pool(name)], **options), models.sources(5))
    assert accelerated() == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(1, 5), (7, 40), (3, 90)], ids=str)
@pytest.mark.parametrize("name", ["post-norm", "bart"])
def test_sources_of_all_shapes(name, shape, seed):
    sample = models.sources(*shape, left_pad=bool(seed % 2), seed=seed)
    check(lambda: generator_for([pool(name, seed)], beam_size=seed + 1), sample)


def test_the_source_is_shared_when_it_is_long(monkeypatch):
    shared = []
    monkeypatch.setattr(kv, "MIN_TABLE_BYTES", 2**30)  # what is generated is not meant here
    monkeypatch.setattr(KVView, "of", staticmethod(lambda *args, of=KVView.of: shared.append(1) or of(*args)))
    check(lambda: generator_for([pool("post-norm")], beam_size=3), models.sources(3, 90))
    assert shared
    shared.clear()
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 2**30)
    check(lambda: generator_for([pool("post-norm")], beam_size=3), models.sources(3, 90))
    assert not shared


@pytest.mark.parametrize("length", [12, 50])
@pytest.mark.parametrize(
    "members",
    [
        [("post-norm", 0), ("post-norm", 1)],
        [("post-norm", 0), ("pre-norm", 1), ("shared", 2)],
        [("post-norm", 0), ("post-norm", 0)],
    ],
    ids=["two", "three kinds", "the same twice"],
)
def test_ensembles(members, length):
    check(lambda: generator_for([pool(*member) for member in members], beam_size=4), models.sources(5, length))


@pytest.mark.parametrize("name", ["post-norm", "mbart"])
@pytest.mark.parametrize(
    "prefix",
    [
        [[5], [6], [7], [8]], [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]],
        [[5, 6, 7], [8, 1, 1], [1, 1, 1], [14, 15, 1]], [[5, 2, 1], [8, 9, 2], [11, 12, 13], [14, 2, 1]],
    ],
    ids=["language", "several", "of different lengths", "with an end"],
)  # fmt: skip
def test_prefix_tokens(name, prefix):
    sample = models.sources(4)
    check(lambda: generator_for([pool(name)], beam_size=3), sample, prefix_tokens=torch.tensor(prefix))
    check(lambda: generator_for([pool(name)], beam_size=3), sample, prefix_tokens=torch.tensor(prefix), bos_token=7)


def test_a_source_that_ends_at_the_first_step():
    """It leaves the batch before the others have a row for each sequence."""
    prefix = torch.tensor([[7, 5], [2, 1], [8, 9], [2, 1]])
    found = check(lambda: generator_for([pool("post-norm")], beam_size=1), models.sources(4), prefix_tokens=prefix)
    assert found[1][0]["tokens"].tolist() == [2] and len(found[0][0]["tokens"]) > 2


@pytest.mark.parametrize("kind", ["ordered", "unordered"])
def test_constraints(kind):
    # As FairSeq packs them: how many there are, then each followed by a zero.
    constraints = torch.tensor([[2, 9, 12, 0, 20, 0], [1, 30, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 11, 40, 41, 0, 0]])

    def make() -> Any:
        return generator_for(
            [pool("post-norm")], beam_size=5, _search=lambda words: search.LexicallyConstrainedBeamSearch(words, kind)
        )

    check(make, models.sources(4), constraints=constraints)


def test_with_a_language_model():
    check(
        lambda: generator_for([pool("post-norm")], beam_size=4, lm_model=pool("lm"), lm_weight=0.4),
        models.sources(4),
    )


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("name", ["post-norm", "shared"])
def test_alignments(name, kind):
    check(
        lambda: generator_for([pool(name)], SequenceGeneratorWithAlignment, beam_size=3, print_alignment=kind),
        models.sources(4),
    )


@pytest.mark.parametrize("name", ["post-norm", "bart"])
def test_attention_of_a_model_made_fast_for_generation(name):
    made = models.SEQ2SEQ[name](seed=0)
    made.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    check(lambda: generator_for([made], beam_size=4), models.sources(4))


@pytest.mark.parametrize(("more", "count"), [({}, 6), ({"candidate_multiple": 1}, 3)], ids=["0.12.2", "fairseq-fixed"])
def test_candidates_of_a_step(more, count):
    """The releases differ in a parameter."""
    lprobs, scores = torch.randn(2, 3, 7), torch.randn(2, 3, 5)
    with Call.entered(Call(object(), 3, 1, set(), 1)):
        best, words, sequences = step(None, None, (3, lprobs, scores), more)
    want, indices = torch.topk((lprobs + scores[:, :, 2:3]).flatten(1), count)
    assert torch.equal(best, want) and torch.equal(sequences * 7 + words, indices)


def test_forward_is_generate():
    sample = models.sources(3)
    generator = generator_for([pool("post-norm")], beam_size=2)
    assert [h["tokens"].tolist() for h in generator(sample)[0]] == [
        h["tokens"].tolist() for h in generator.generate([], sample)[0]
    ]
    assert accelerated() == 2


def test_half_precision_runs():
    generator = generator_for([models.SEQ2SEQ["post-norm"](seed=0).bfloat16()], beam_size=2)
    assert len(generator.generate([], models.sources(3, 50))) == 3
    assert accelerated() == 1


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["plain", "no repeated 2-gram"])
@pytest.mark.parametrize("members", [1, 2])
def test_in_inference_mode(members, options):
    with torch.inference_mode():
        check(
            lambda: generator_for([pool("post-norm", i) for i in range(members)], beam_size=3, **options),
            models.sources(4),
        )
    assert accelerated() == 1
