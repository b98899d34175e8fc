"""Two operators of a step, alone, at the sizes of BART-base with 16 inputs and 4 beams.

No-repeat n-grams: the library's processor, and the operator in place, as `generate` uses it. The tokens are drawn from
few different ones, so that there is something to ban.

The attention over what the beams share: `scaled_dot_product_attention` on K/V that is repeated for each beam, the
operator, and a copy of the K/V of a layer. Reading K/V is the floor, since each byte comes from memory once per step.
"of_copy_bandwidth" is bytes of K/V per second over the bytes per second, read and written, of the copy. Every call
works on the K/V of another layer, so that none is in the caches already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastgen
from benchmarks.measure import alternate, summary
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Workload

_SAMPLE_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Operator(Workload):
    """Seconds of a call, from as many calls as fill 0.2 seconds."""

    repetitions: int = 7
    quick_repetitions: int = 3
    quick: bool = True

    group = "operator"

    def compare(self, context: Context, record: Record, work: Mapping[str, Callable[[], Tensor]]) -> None:
        """Interleaved calls, and the ratio of their medians."""
        runs = {name: _sampler(call, context.device) for name, call in work.items()}
        samples = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in found]) for name, found in samples.items()}
        record.compare()


def _sampler(call: Callable[[], Any], device: torch.device) -> Callable[[], tuple[float, None]]:
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


@dataclass(frozen=True, kw_only=True)
class NoRepeatNGram(Operator):
    """Attributes: `length` tokens in each of `rows` rows, `n`-grams, and the size of the vocabulary."""

    length: int
    rows: int = 64
    vocabulary: int = 50265
    n: int = 3
    different_tokens: int = 40

    def run(self, context: Context, record: Record) -> None:
        from transformers import NoRepeatNGramLogitsProcessor

        from fastgen.ops import no_repeat_ngram

        sizes = {name: getattr(self, name) for name in ("rows", "vocabulary", "length", "n")}
        record.parameters = {**sizes, "backend": no_repeat_ngram.backend()}
        torch.manual_seed(0)
        # A step of beam search: many rows are at the same length, and any token may have been generated.
        tokens = torch.randint(min(self.different_tokens, self.vocabulary), (self.rows, self.length))
        tokens = tokens.to(context.device)
        scores = torch.randn(self.rows, self.vocabulary).to(context.device)
        processor = NoRepeatNGramLogitsProcessor(self.n)
        in_place = scores.clone()  # banning the same tokens again changes nothing

        def unpatched() -> Tensor:
            with fastgen.disabled():
                return processor(tokens, scores)

        work: dict[str, Callable[[], Tensor]] = {
            "transformers": unpatched,
            "fastgen": lambda: no_repeat_ngram.no_repeat_ngram_(in_place, tokens, self.n),
        }
        expected, found = (call() for call in work.values())
        record.identical = torch.equal(found, expected)
        record.metrics["banned"] = float((expected == -math.inf).sum())
        self.compare(context, record, work)


@dataclass(frozen=True, kw_only=True)
class SharedPrefixAttention(Operator):
    """Attributes: the sizes, and how many layers take turns."""

    batch: int = 16
    heads: int = 12
    beams: int = 4
    prefix: int = 1024
    dim: int = 64
    layers: int = 4

    def run(self, context: Context, record: Record) -> None:
        from fastgen.ops import attention

        sizes = {name: getattr(self, name) for name in ("batch", "heads", "beams", "prefix", "dim", "layers")}
        record.parameters = {**sizes, "dtype": "float32", "backend": attention.backend()}
        torch.manual_seed(0)
        query = torch.randn(self.batch * self.beams, self.heads, 1, self.dim).to(context.device)
        shape = 2, self.batch, self.heads, self.prefix, self.dim
        shared = [torch.randn(shape).to(context.device) for _ in range(self.layers)]
        repeated = [tuple(x.repeat_interleave(self.beams, dim=0) for x in layer) for layer in shared[:2]]
        target = torch.empty_like(shared[0])
        work: dict[str, Callable[[], Tensor]] = {
            "transformers": _in_turn(lambda layer: F.scaled_dot_product_attention(query, *layer), repeated),
            "fastgen": _in_turn(lambda layer: attention.shared_prefix_attention(query, *layer), shared),
            "copy": _in_turn(target.copy_, shared),
        }
        difference = (work["fastgen"]() - work["transformers"]()).abs().max().item()
        # Both sum 1,024 products of numbers about 1 in float32, each in its own order.
        if not difference < 1e-4:
            record.errors.append(f"the operator differs from scaled_dot_product_attention by {difference:.3g}")
        self.compare(context, record, work)
        seconds = {name: backend["median"] for name, backend in record.backends.items()}
        read, copied = target.nbytes / seconds["fastgen"], 2 * target.nbytes / seconds["copy"]
        record.metrics["of_copy_bandwidth"] = read / copied
        record.notes.append(
            f"the operator reads {read / 1e9:.1f} GB of K/V per second; a copy moves {copied / 1e9:.1f} GB"
        )


def _in_turn(call: Callable[[Any], Tensor], layers: Iterable[Any]) -> Callable[[], Tensor]:
    """A function that works on the next of the layers each time."""
    following = cycle(layers)
    return lambda: call(next(following))


WORKLOADS: list[Workload] = [
    *(
        NoRepeatNGram(
            name=f"no-repeat-ngram-{length}",
            title=f"No-repeat 3-grams, 64 rows x 50,265, length {length}",
            length=length,
        )
        for length in (64, 512)
    ),
    SharedPrefixAttention(
        name="attention-b16-s1024",
        title="Attention, 16 x 12 heads, 4 beams, prefix 1,024",
        targets=(Target("K/V read per second, as a part of what a copy moves", "of_copy_bandwidth", at_least=0.7),),
    ),
]
