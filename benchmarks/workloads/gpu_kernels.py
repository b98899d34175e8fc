"""Operators of a captured step on a GPU: no-repeat n-grams, and the attention of a step against its byte floor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.kernel_times import attention_case, measure
from benchmarks.measure import copy_bandwidth, seconds_of, summary
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Workload
from benchmarks.workloads.no_repeat_ngram import NoRepeatNGram


@dataclass(frozen=True, kw_only=True)
class NoRepeatNGramInGraph(NoRepeatNGram):
    """The backends of `no_repeat_ngram.py`, started by the host, and the operator as it runs in a captured step.

    The metric "graph_us" is the time of one call among many in a CUDA graph, in microseconds. The backend "loop" is the
    loop over the rows on the CPU, which has to fetch the tokens from the GPU.
    """

    rows: int = 512
    vocabulary: int = 50264
    calls: int = 64
    needs_gpu: bool = True
    repetitions: int = 3
    quick: bool = False

    def run(self, context: Context, record: Record) -> None:
        from fastgen.ops.no_repeat_ngram import no_repeat_ngram_

        super().run(context, record)
        tokens = torch.randint(min(self.different_tokens, self.vocabulary), (self.rows, self.length))
        tokens = tokens.to(context.device)
        scores = torch.randn(self.rows, self.vocabulary, device=context.device)
        lengths = torch.full((self.rows,), self.length, device=context.device)
        seconds = seconds_of([lambda: no_repeat_ngram_(scores, tokens, self.n, lengths)] * self.calls, context.device)
        record.backends["fastgen, in a graph"] = summary([seconds])
        record.metrics["graph_us"] = seconds * 1e6


@dataclass(frozen=True, kw_only=True)
class DecodeAttention(Workload):
    """The attention of a step over a prefix that the beams share. Seconds of a call in a CUDA graph. Backends:

    * transformers: `scaled_dot_product_attention` over K/V that is repeated for each beam;
    * fastgen: the kernel, whose result is compared with its reference first;
    * copy: the time in which a large copy moves the bytes that the kernel has to move at the least.

    The metric "of_copy_bandwidth" is the last over the second.
    """

    batch: int = 128
    beams: int = 4
    heads: int = 16
    prefix: int = 1024
    dim: int = 64
    dtype: str = "float16"
    copy_bytes: int = 2**31
    needs_gpu: bool = True

    group = "operator"

    def run(self, context: Context, record: Record) -> None:
        names = ("batch", "beams", "heads", "prefix", "dim", "dtype")
        record.parameters = {name: getattr(self, name) for name in names}
        torch.manual_seed(0)
        device, dtype = context.device, getattr(torch, self.dtype)
        speed = copy_bandwidth(device, self.copy_bytes)
        record.metrics["copy_gb_per_second"] = speed / 1e9
        case = attention_case(self.title, device, dtype, self.batch, self.beams, self.heads, 1, self.dim, self.prefix)
        row = measure(case, device, speed)
        record.backends = {
            "transformers": summary([self._repeated(device, dtype)]),
            "fastgen": summary([row.microseconds / 1e6]),
            "copy": summary([row.floor / 1e6]),
        }
        record.metrics["relative_error"] = row.error
        record.metrics["of_copy_bandwidth"] = row.share
        record.compare()

    def _repeated(self, device: torch.device, dtype: torch.dtype) -> float:
        rows = self.batch * self.beams
        query = torch.randn(rows, self.heads, 1, self.dim, device=device, dtype=dtype)
        shape = (rows, self.heads, self.prefix, self.dim)
        keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        return seconds_of([lambda: F.scaled_dot_product_attention(query, keys, values)] * 8, device)


NO_REPEAT_NGRAM = NoRepeatNGramInGraph(
    name="gpu-no-repeat-ngram-128x4",
    title="No-repeat 3-grams, 128 x 4 rows, length 140",
    length=140,
    seconds=15,
    targets=(Target("microseconds of a call inside a graph", "graph_us", at_most=15),),
)
ATTENTION = DecodeAttention(
    name="gpu-attention-b128-s1024",
    title="Decode attention, BART-large, batch 128, 4 beams, prefix 1024, fp16",
    seconds=15,
    targets=(Target("bytes per second, as a part of what a copy moves", "of_copy_bandwidth", at_least=0.7),),
)
