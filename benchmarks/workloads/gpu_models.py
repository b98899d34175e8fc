"""The models of the FastSeq paper's tables on a GPU, as shapes with random weights, in float16; and Llama-7B.

Yan et al., "FastSeq: Make Sequence Generation Faster" (ACL 2021), table 1. All sequences get as many new tokens as the
longest may have: random weights do not end a text, and the work is the same for every backend. In half precision
two sums of the same numbers in another order may differ in the last bit, and random weights have many tokens of almost
the same probability. So the share of equal sequences is reported, and only trained models can judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import copy_bandwidth
from benchmarks.record import Record, Target
from benchmarks.workload import CAPTURED_STEP, Context, Generation
from benchmarks.workloads.shapes import (
    bart_distilled,
    bart_large,
    gpt2,
    llama_7b,
    prophetnet_large,
    t5_base,
    unilm_base,
)

HOOKS = "fastgen-hooks"


@dataclass(frozen=True, kw_only=True)
class OnGpu(Generation):
    """Generation in half precision, with the captured step and without."""

    dtype: str = "float16"
    needs_gpu: bool = True
    repetitions: int = 2
    memory: bool = False  # measured on the device, beside the times
    gpu_backends: tuple[str, ...] = (HOOKS,)

    entry_point = CAPTURED_STEP


@dataclass(frozen=True, kw_only=True)
class WeightBound(OnGpu):
    """A batch so small that a step takes as long as reading the weights.

    The metric "mbu" is the model bandwidth utilisation: bytes of the weights times tokens per second, over the bytes
    per second (read and written) of a large copy. Prefill counts as time; the embedding does not count as weights
    unless it is the output layer as well: a step reads a row of it.
    """

    dtype: str = "bfloat16"
    copy_bytes: int = 2**31

    def _finish(self, context: Context, record: Record, model: Any) -> None:
        weights = {id(x): x for x in model.parameters()}
        embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if embedding is not output:
            del weights[id(embedding)]
        read = sum(x.nbytes for x in weights.values())
        speed = copy_bandwidth(context.device, self.copy_bytes)
        record.parameters["weight_bytes_read"] = read
        record.metrics["copy_gb_per_second"] = speed / 1e9
        for name, found in record.backends.items():
            share = read * self.new_tokens / found["median"] / speed
            record.metrics["mbu" if name == record.subject else f"mbu {name}"] = share


def news_lengths(batch: int, longest: int) -> Tensor:
    """[batch]: lengths as those of news articles in tokens, cut at the longest that the model takes.

    Quantiles of a log-normal distribution with a mean of about 910 tokens and a standard deviation of half of that,
    which is about what the articles of CNN/DM have (781 words on average).
    """
    middle = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(batch, dtype=torch.float64) + 0.5) / batch)
    return (815 * (0.47 * middle).exp()).round().long().clamp(max=longest)


def sentence_lengths(batch: int, longest: int) -> Tensor:
    """[batch]: lengths as those of sentences to translate: from a few tokens to the longest, most of them short."""
    places = (torch.arange(batch, dtype=torch.float64) + 0.5) / batch
    return (4 + (longest - 4) * places**2).round().long().clamp(max=longest)


def ahead_of_fastseq(ratio: float) -> Target:
    """Against what the paper reports for this model over Transformers, each with its largest batch, on a V100."""
    return Target("times as fast as unpatched: ahead of the FastSeq paper", "ratio", at_least=ratio)


_BEAMS = {"num_beams": 4, "do_sample": False}
_NO_REPEAT = {**_BEAMS, "no_repeat_ngram_size": 3}
_SUMMARY = {**_NO_REPEAT, "length_penalty": 2.0, "early_stopping": True}


def _workload(name: str, title: str, shape: Callable[..., Any], length: int, new_tokens: int, **changes: Any) -> OnGpu:
    fields: dict[str, Any] = {"batch": 32, "options": _SUMMARY, "lengths": news_lengths} | changes
    what = "prompt" if fields["lengths"] is None else "sources up to"
    return OnGpu(
        name=f"gpu-{name}-b32",
        title=f"{title}, fp16, batch 32, 4 beams, {what} {length}",
        shape=shape,
        length=length,
        new_tokens=new_tokens,
        **fields,
    )


BART_LARGE = _workload(
    *("bart-large", "BART-large", bart_large, 1024, 140),
    targets=(Target("times as fast as unpatched, same batch", "ratio", at_least=8),),
)
DISTILBART = _workload(*("distilbart", "DistilBART 12-6", bart_distilled, 1024, 140), targets=(ahead_of_fastseq(5.4),))
PROPHETNET = _workload(
    *("prophetnet", "ProphetNet-large", prophetnet_large, 512, 110),
    options={**_SUMMARY, "length_penalty": 1.2},
    targets=(ahead_of_fastseq(3.8),),
)
T5 = _workload(
    *("t5-base", "T5-base", t5_base, 128, 128),
    lengths=sentence_lengths,
    options={**_BEAMS, "early_stopping": True},
    targets=(ahead_of_fastseq(4.3),),
)
GPT2 = _workload(
    *("gpt2", "GPT-2 124M", gpt2, 512, 64), lengths=None, options=_NO_REPEAT, targets=(ahead_of_fastseq(5.5),)
)
UNILM = _workload(*("unilm", "UniLM-base", unilm_base, 464, 48), options=_NO_REPEAT, targets=(ahead_of_fastseq(9.6),))
LLAMA_7B = WeightBound(
    name="gpu-llama-7b-b1",
    title="Llama-7B, bf16, batch 1, greedy, prompt 128",
    shape=llama_7b,
    batch=1,
    length=128,
    new_tokens=128,
    options={"do_sample": False},
    targets=(
        Target("times as fast as unpatched", "ratio", at_least=6),
        Target("model bandwidth utilisation", "mbu", at_least=0.75),
    ),
)
