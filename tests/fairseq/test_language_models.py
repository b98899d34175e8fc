"""What language models generate after a prefix, which FastGen runs once per source and at once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fastgen.optimizer.fairseq.call import Prefill
from tests.fairseq import models
from tests.fairseq.check import accelerated, check
from tests.fairseq.test_generate import OPTIONS, generator_for

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(8)]


@functools.cache
def pool(name: str, seed: int = 0) -> Any:
    """Models by name and seed, made once."""
    return models.LANGUAGE_MODELS[name](seed=seed)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every prefix that is run at once."""
    lengths: list[int] = []
    run = Prefill.run

    def counting(prefill: Prefill, *args: Any) -> None:
        lengths.append(prefill.steps)
        run(prefill, *args)

    monkeypatch.setattr(Prefill, "run", counting)
    return lengths


def check_prefix(make: Any, prefix: torch.Tensor, **arguments: Any) -> Any:
    sample = {"id": torch.arange(len(prefix)), "net_input": {"src_tokens": prefix}}
    return check(make, sample, prefix_tokens=prefix, **arguments)


def is_about_sources(name: str) -> bool:
    return name in ("of the source's length", "constrained length", "maximum length")


@pytest.mark.parametrize("option", [name for name in OPTIONS if not is_about_sources(name)])
@pytest.mark.parametrize("name", models.LANGUAGE_MODELS)
def test_hypotheses_are_the_same(runs, name, option):
    options = {**OPTIONS[option], "max_len_b": 52}
    if option == "other end":
        options["eos"] = 63
    check_prefix(lambda: generator_for([pool(name)], **options), models.prefixes(4, 40))
    assert accelerated() == 1
    assert runs == ([] if name == "layerdrop" or option == "allowed tokens" else [40])


@pytest.mark.parametrize("seed", range(8))
def test_prefixes_of_all_lengths(runs, seed):
    length = [2, 3, 31, 32, 33, 64, 100, 5][seed]
    check_prefix(
        lambda: generator_for([pool("gpt2", seed)], beam_size=1 + seed % 5, max_len_b=length + 15),
        models.prefixes(1 + seed % 4, length, seed=seed),
        bos_token=2 + seed,
    )
    assert runs == [length]


def test_prefixes_of_different_lengths_run_at_once_as_far_as_the_shortest(runs):
    prefix = models.prefixes(4, 40)
    prefix[1, 37:] = prefix[2, 35:] = 1
    check_prefix(lambda: generator_for([pool("post-norm")], beam_size=4, max_len_b=60), prefix)
    assert runs == [35]


def test_a_prefix_that_ends(runs):
    prefix = models.prefixes(4, 20)
    prefix[1, 12], prefix[1, 13:] = 2, 1
    prefix[3, 17] = 2
    check_prefix(lambda: generator_for([pool("post-norm")], beam_size=3, max_len_b=30), prefix)
    assert runs == [12]


@pytest.mark.parametrize("max_len", [10, 39, 40, 41, 42])
def test_a_prefix_as_long_as_the_sequence_may_be(runs, max_len):
    check_prefix(lambda: generator_for([pool("post-norm")], beam_size=3, max_len_b=max_len), models.prefixes(3, 40))
    assert runs == [min(max_len, 40)]


def test_a_prefix_that_repeats_an_ngram_is_not_run_at_once(runs):
    prefix = models.prefixes(3, 40)
    prefix[1, 20:23] = prefix[1, 3:6]
    make = dict(beam_size=3, max_len_b=50)
    check_prefix(lambda: generator_for([pool("post-norm")], **make), prefix)
    assert runs == [40]
    runs.clear()
    check_prefix(lambda: generator_for([pool("post-norm")], **make, no_repeat_ngram_size=3), prefix)
    assert runs == []


def test_unknown_words_in_a_prefix(runs):
    prefix = models.prefixes(3, 10)
    prefix[0, 4] = prefix[2, 9] = 3
    check_prefix(lambda: generator_for([pool("post-norm")], beam_size=3, max_len_b=20, unk_penalty=1.5), prefix)
    assert runs == [10]


def test_ensembles_and_fusion_go_step_by_step_or_at_once(runs):
    prefix = models.prefixes(3, 12)
    check_prefix(lambda: generator_for([pool("gpt2"), pool("gpt2", 1)], beam_size=3, max_len_b=30), prefix)
    assert runs == []
    check_prefix(
        lambda: generator_for([pool("gpt2")], beam_size=3, max_len_b=30, lm_model=pool("post-norm"), lm_weight=0.3),
        prefix,
    )
    assert runs == [12]


def test_without_a_prefix(runs):
    sample = {"net_input": {"src_tokens": torch.full((3, 4), 5)}}
    check(lambda: generator_for([pool("gpt2")], beam_size=3), sample)
    assert runs == [] and accelerated() == 1
