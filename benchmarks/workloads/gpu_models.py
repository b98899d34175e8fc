"""Workloads for an NVIDIA GPU, the most informative first: a check with a time limit may not reach the last ones.

They are the models of the FastSeq paper's tables, as shapes with random weights, in float16; and Llama-7B.

Yan et al., "FastSeq: Make Sequence Generation Faster" (ACL 2021), table 1. All sequences get the maximum number of new
tokens: random weights do not end a text, and the work is the same for every backend. In half precision a different
order of summation may change the last bit, and random weights give many tokens almost the same probability. The share
of equal sequences is therefore reported, but only trained models can judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import copy_bandwidth
from benchmarks.record import Record
from benchmarks.workload import CAPTURED_STEP, Context, Generation, Workload
from benchmarks.workloads import fairseq_shapes, shapes
from benchmarks.workloads.half_precision import HALF_ON_GPU

_FAIRSEQ = next(workload for workload in fairseq_shapes.WORKLOADS if workload.name == "fairseq-wmt-b64")


@dataclass(frozen=True, kw_only=True)
class OnGpu(Generation):
    """Generation in half precision, with the captured step and without."""

    dtype: str = "float16"
    needs_gpu: bool = True
    repetitions: int = 2
    further_backends: tuple[str, ...] = ("fastgen-hooks",)

    entry_point = CAPTURED_STEP


@dataclass(frozen=True, kw_only=True)
class WeightBound(OnGpu):
    """A batch so small that a step takes as long as reading the weights.

    The metric "mbu" is the model bandwidth utilisation: bytes of the weights times tokens per second, divided by the
    bytes per second (read and written) of a large copy. Prefill counts as time. The embedding counts as a weight only
    if it is also the output layer: otherwise a step reads one row of it.
    """

    dtype: str = "bfloat16"
    copy_bytes: int = 2**31

    def finish(self, context: Context, record: Record, model: Any) -> None:
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
    """Returns lengths [batch] similar to those of news articles in tokens, capped at the model's maximum.

    Quantiles of a log-normal distribution with a mean of about 910 tokens and a standard deviation of half of that,
    similar to the articles of CNN/DM (781 words on average).
    """
    middle = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(batch, dtype=torch.float64) + 0.5) / batch)
    return (815 * (0.47 * middle).exp()).round().long().clamp(max=longest)


def sentence_lengths(batch: int, longest: int) -> Tensor:
    """Returns lengths [batch] like those of sentences to translate: from a few tokens to the longest, mostly short."""
    places = (torch.arange(batch, dtype=torch.float64) + 0.5) / batch
    return (4 + (longest - 4) * places**2).round().long().clamp(max=longest)


_BEAMS = {"num_beams": 4, "do_sample": False}
_NO_REPEAT = {**_BEAMS, "no_repeat_ngram_size": 3}
_TRANSLATION = {**_BEAMS, "early_stopping": True}
_SUMMARY = {**_NO_REPEAT, **_TRANSLATION, "length_penalty": 2.0}
_SHORTER = {**_SUMMARY, "length_penalty": 1.2}


def _paper(name: str, title: str, shape: Callable[..., Any], length: int, new_tokens: int, **changes: Any) -> OnGpu:
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


WORKLOADS: list[Workload] = [
    _paper("bart-large", "BART-large", shapes.bart_large, 1024, 140),
    HALF_ON_GPU,
    WeightBound(
        name="gpu-llama-7b-b1",
        title="Llama-7B, bf16, batch 1, greedy, prompt 128",
        shape=shapes.llama_7b,
        batch=1,
        length=128,
        new_tokens=128,
        options={"do_sample": False},
    ),
    _paper("gpt2", "GPT-2 124M", shapes.gpt2, 512, 64, lengths=None, options=_NO_REPEAT),
    _paper("t5-base", "T5-base", shapes.t5_base, 128, 128, lengths=sentence_lengths, options=_TRANSLATION),
    _paper("distilbart", "DistilBART 12-6", shapes.bart_distilled, 1024, 140),
    _paper("prophetnet", "ProphetNet-large", shapes.prophetnet_large, 512, 110, options=_SHORTER),
    _paper("unilm", "UniLM-base", shapes.unilm_base, 464, 48, options=_NO_REPEAT),
    replace(
        _FAIRSEQ,
        name="gpu-fairseq-wmt-b64",
        title=f"{_FAIRSEQ.title}, fp16",
        dtype="float16",
        needs_gpu=True,
        repetitions=2,
    ),
]
