"""Sums of sentence statistics give what sacrebleu and rouge-score give for the corpus."""

from __future__ import annotations

import importlib.util
import random

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.postprocess import MetricTotals, PostprocessJob, Processor
from tests.pipeline import tiny

NAMES = ("bleu", "chrf", "rouge", "exact")


def corpora():
    references = [text.capitalize() + "." for text in tiny.sentences(60, seed=1)]
    noise = random.Random(3)
    near = [" ".join(word for word in text.split() if noise.random() < 0.8) for text in references]
    return {
        "near": (near, references), "same": (references, references), "nothing": ([""] * len(references), references),
        "no match": (["xyz"] * len(references), references), "some empty": ([""] + near[1:], [*references[:-1], ""]),
        "unicode": (["Ein Haus – schön!", "雪が降る。"], ["Ein schönes Haus!", "雪が降った。"]),
    }  # fmt: skip


def scores(outputs, references):
    totals = MetricTotals()
    pairs = zip(outputs, references, strict=True)
    for outcome in Processor(PostprocessJob(metrics=NAMES))([([output], reference) for output, reference in pairs]):
        totals.add(outcome.statistics)
    return totals.scores()


@pytest.mark.parametrize("name", list(corpora()))
def test_corpus_scores_equal_those_of_the_libraries(name):
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu, corpus_chrf

    outputs, references = corpora()[name]
    found = scores(outputs, references)
    assert found["bleu"] == corpus_bleu(outputs, [references]).score
    assert found["chrf"] == corpus_chrf(outputs, [references]).score
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    each = [scorer.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert found[kind] == pytest.approx(100 * sum(score[kind].fmeasure for score in each) / len(each), abs=1e-12)
    same = sum(output.strip() == reference.strip() for output, reference in zip(outputs, references, strict=True))
    assert found["exact"] == 100 * same / len(outputs)


def test_a_package_that_is_missing(monkeypatch):
    # Of these alone: what else is looked for meanwhile is remembered by who looks.
    find, missing = importlib.util.find_spec, ("sacrebleu", "rouge_score")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    with pytest.raises(SetupError, match="rouge-score"):
        PostprocessJob(metrics=("exact", "rouge")).check()
