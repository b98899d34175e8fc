"""Corpus metrics as sums of per-sentence statistics.

Each output is measured on its own, in a worker, and what it yields is small: counts of n-grams for BLEU and chrF, three
F-scores for ROUGE, one bit for exact match. The corpus score is computed from their sums at the end. BLEU and chrF
are sacrebleu's own to the last digit, because sacrebleu computes its corpus scores from the same integer sums; it is
asked for them through the two methods that its `corpus_score` consists of. Keeping the sums in the journal lets a
resumed run report the metrics of the whole.
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
    """A SetupError where a metric needs a package that is not installed."""
    for name in names:
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise SetupError(f"metric {name} needs the package {package.replace('_', '-')}, which is not installed")


def _sacrebleu(name: str) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    # `force` silences a warning about tokenised text that would come from every worker.
    return BLEU(force=True) if name == "bleu" else CHRF()


def sentence_statistics(names: Sequence[str]) -> Callable[[str, str], Statistics]:
    """A function from an output and its reference to the statistics of every metric named."""
    measures: dict[str, Callable[[str, str], list[float]]] = {}
    for name in names:
        if name in ("bleu", "chrf"):
            metric = _sacrebleu(name)
            measures[name] = lambda text, reference, metric=metric: list(  # type: ignore[misc]
                metric._extract_corpus_statistics([text], [[reference]])[0]
            )
        elif name == "rouge":
            from rouge_score.rouge_scorer import RougeScorer

            # With the stemmer, as the Transformers summarisation script has it.
            scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=True)

            def rouge(text: str, reference: str, scorer: Any = scorer) -> list[float]:
                scores = scorer.score(reference, text)
                return [scores[kind].fmeasure for kind in ROUGE_TYPES]

            measures[name] = rouge
        elif name == "exact":
            measures[name] = lambda text, reference: [float(text.strip() == reference.strip())]
    return lambda text, reference: {name: measure(text, reference) for name, measure in measures.items()}


class MetricTotals:
    """The sums, and the scores that follow from them (0 to 100 each)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.samples = 0
        self._sums: dict[str, list[float]] = {}

    def add(self, statistics: Mapping[str, Sequence[float]]) -> None:
        """Count one output. Outputs must come in input order for the last digit of ROUGE to be repeatable."""
        self.samples += 1
        for name, values in statistics.items():
            sums = self._sums.setdefault(name, [0] * len(values))
            for index, value in enumerate(values):
                sums[index] += value

    def scores(self) -> dict[str, float]:
        """The corpus scores of everything added so far; empty where nothing was."""
        scores: dict[str, float] = {}
        for name in self.names:
            sums = self._sums.get(name)
            if sums is None:
                continue
            if name in ("bleu", "chrf"):
                scores[name] = _sacrebleu(name)._aggregate_and_compute([sums]).score
            elif name == "rouge":
                scores.update({kind: 100 * total / self.samples for kind, total in zip(ROUGE_TYPES, sums, strict=True)})
            else:
                scores[name] = 100 * sums[0] / self.samples
        return scores
