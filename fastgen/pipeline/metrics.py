"""Corpus metrics as sums of per-sentence statistics.

A worker measures each output by itself and returns a few numbers: counts of n-grams for BLEU and chrF, three F-scores
for ROUGE, 0 or 1 for exact match. The corpus score is computed from their sums at the end. BLEU and chrF are equal to
sacrebleu's to the last digit: the two methods called here are those that its `corpus_score` calls, and their sums are
sums of integers. The journal keeps the statistics, so a resumed run reports the metrics of all records.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastgen.pipeline.errors import SetupError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
_PACKAGES = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge": "rouge_score"}

Statistics = dict[str, list[float]]


def check_metrics(names: Sequence[str]) -> None:
    """Raises `SetupError` where a metric needs a package that is not installed."""
    for name in names:
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise SetupError(f"metric {name} needs the package {package.replace('_', '-')}, which is not installed")


def _sacrebleu(name: str) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    # `force` silences a warning about tokenised text, which every worker would print.
    return BLEU(force=True) if name == "bleu" else CHRF()


def _measure(name: str) -> Callable[[str, str], list[float]]:
    if name == "exact":
        return lambda text, reference: [float(text.strip() == reference.strip())]
    if name == "rouge":
        from rouge_score.rouge_scorer import RougeScorer

        # With the stemmer, as the Transformers summarisation script has it.
        scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=True)
        return lambda text, reference: [score.fmeasure for score in scorer.score(reference, text).values()]
    metric = _sacrebleu(name)
    return lambda text, reference: list(metric._extract_corpus_statistics([text], [[reference]])[0])


def sentence_statistics(names: Sequence[str]) -> Callable[[str, str], Statistics]:
    """A function from an output and its reference to the statistics of every metric named."""
    measures = {name: _measure(name) for name in names}
    return lambda text, reference: {name: measure(text, reference) for name, measure in measures.items()}


class MetricTotals:
    """The sums of the statistics, and the corpus scores (each from 0 to 100)."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, list[float]] = {}

    def add(self, statistics: Mapping[str, Sequence[float]]) -> None:
        """Add one output. The last digit of ROUGE depends on the order, so outputs are added in input order."""
        self.samples += 1
        for name, values in statistics.items():
            sums = self._sums.setdefault(name, [0] * len(values))
            for index, value in enumerate(values):
                sums[index] += value

    def scores(self) -> dict[str, float]:
        """The corpus scores of all outputs added so far; empty if there is none."""
        scores: dict[str, float] = {}
        for name, sums in self._sums.items():
            if name in ("bleu", "chrf"):
                scores[name] = _sacrebleu(name)._aggregate_and_compute([sums]).score
            elif name == "rouge":
                scores.update({kind: 100 * total / self.samples for kind, total in zip(ROUGE_TYPES, sums, strict=True)})
            else:
                scores[name] = 100 * sums[0] / self.samples
        return scores
