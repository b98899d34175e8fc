"""The no-repeat n-gram operator, at the size of a step of BART-base with 16 inputs and 4 beams.

Every backend gets the same scores and tokens. The tokens are drawn from few different ones, so that there is something
to ban. Backends:

* transformers: the library's processor, which makes new scores and leaves the old as they are;
* loop: a plain Python loop over the rows, as the library's processor was in earlier releases;
* fastgen: the operator, in place, as `generate` uses it;
* fastgen, with a copy: the operator on a copy of the scores, as `generate` uses it where somebody else holds them;
* fastgen reference: the operator in plain torch, in place, which serves where the extension is not built.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.measure import alternate, summary
from benchmarks.record import Record
from benchmarks.workload import Context, Workload

_SAMPLE_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class NoRepeatNGram(Workload):
    """Attributes: `length` tokens in each of `rows` rows, `n`-grams, and the size of the vocabulary."""

    length: int
    rows: int = 64
    vocabulary: int = 50265
    n: int = 3
    different_tokens: int = 40
    repetitions: int = 7
    quick_repetitions: int = 3
    quick: bool = True

    group = "operator"

    def run(self, context: Context, record: Record) -> None:
        from transformers import NoRepeatNGramLogitsProcessor

        from fastgen.ops import no_repeat_ngram

        record.parameters = {
            "rows": self.rows,
            "vocabulary": self.vocabulary,
            "length": self.length,
            "n": self.n,
            "backend": no_repeat_ngram.backend(),
        }
        torch.manual_seed(0)
        # A step of beam search: many rows are at the same length, and any token may have been generated.
        tokens = torch.randint(min(self.different_tokens, self.vocabulary), (self.rows, self.length))
        tokens = tokens.to(context.device)
        scores = torch.randn(self.rows, self.vocabulary).to(context.device)
        processor = NoRepeatNGramLogitsProcessor(self.n)
        # Banning the same tokens again changes nothing, so the backends that work in place keep their scores.
        in_place, by_reference = scores.clone(), scores.clone()

        def unpatched() -> Tensor:
            with fastgen.disabled():
                return processor(tokens, scores)

        work: dict[str, Callable[[], Tensor]] = {
            "transformers": unpatched,
            "loop": lambda: python_loop(tokens, scores, self.n),
            "fastgen": lambda: no_repeat_ngram.no_repeat_ngram_(in_place, tokens, self.n),
            "fastgen, with a copy": lambda: no_repeat_ngram.no_repeat_ngram_(scores.clone(), tokens, self.n),
            "fastgen reference": lambda: no_repeat_ngram.reference(by_reference, tokens, None, self.n),
        }
        results = {name: call() for name, call in work.items()}
        record.identical = True
        for name, result in results.items():
            if not torch.equal(result, results["transformers"]):
                record.identical = False
                record.notes.append(f"{name} gives other scores than transformers")
        record.metrics["banned"] = float((results["transformers"] == -math.inf).sum())
        del results

        runs = {name: sampler(call, context.device) for name, call in work.items()}
        samples = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in found]) for name, found in samples.items()}
        record.compare()
        # A call of an operator is far under the second from which "never slower" is promised for `generate`.
        record.metrics["ratio_to_loop"] = record.backends["loop"]["median"] / record.backends["fastgen"]["median"]


def sampler(call: Callable[[], Any], device: torch.device) -> Callable[[], tuple[float, None]]:
    """A run that gives the seconds of one call, measured over enough of them."""

    def loop(calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    calls = max(1, round(_SAMPLE_SECONDS / max(loop(3) / 3, 1e-6)))
    return lambda: (loop(calls) / calls, None)


def python_loop(input_ids: Tensor, scores: Tensor, n: int) -> Tensor:
    """The scores with what would repeat an n-gram banned, by a loop over the rows and a dictionary of n-grams each."""
    scores = scores.clone()
    length = input_ids.shape[1]
    for row, tokens in enumerate(input_ids.tolist()):
        followers: dict[tuple[int, ...], list[int]] = {}
        for start in range(length - n + 1):
            *prefix, last = tokens[start : start + n]
            followers.setdefault(tuple(prefix), []).append(last)
        banned = followers.get(tuple(tokens[length - n + 1 :]), []) if length >= n else []
        scores[row, banned] = -math.inf
    return scores


WORKLOADS = [
    NoRepeatNGram(
        name=f"no-repeat-ngram-{length}", title=f"No-repeat 3-grams, 64 rows x 50,265, length {length}", length=length
    )
    for length in (64, 512)
]
