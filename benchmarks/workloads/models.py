"""One call of each kind of model, in the shape of a well-known one: summaries, translations, long prompts, samples.

Those named "small-" have little to gain, and test the promise that no accelerated case is slower: short prompts and
sources, few rows, no beams, lengths just below and above the threshold for sharing, padded batches. Their sizes make
an unpatched run take over a second on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.workload import Generation
from benchmarks.workloads.shapes import bart_base, gpt2, llama_1b, llama_small, opus_mt, t5_base, t5_small, unilm_base

_GREEDY = {"do_sample": False}
_BEAMS = {"num_beams": 4, **_GREEDY}
_SUMMARY = {**_BEAMS, "no_repeat_ngram_size": 3}
_CT2 = ("ctranslate2",)
_INT8 = (*_CT2, "ctranslate2-int8", "fastgen-int8")


def _call(
    name: str, shape: Callable[..., Any], title: str, batch: int, length: int, new_tokens: int, options: dict[str, Any],
    further: tuple[str, ...] = (), **more: Any,
) -> Generation:  # fmt: skip
    sizes = {"batch": batch, "length": length, "new_tokens": new_tokens}
    return Generation(name=name, title=title, shape=shape, options=options, further_backends=further, **sizes, **more)


def _translation(
    name: str, title: str, batch: int, options: dict[str, Any], further: tuple[str, ...] = _CT2
) -> Generation:
    """Translates sentences in the shape of opus-mt."""
    title = f"opus-mt, {title}, source 32"
    return _call(f"opus-mt-{name}", opus_mt, title, batch, 32, 32, options, ("fastgen-hooks", *further), repetitions=7)


def _small(
    name: str, shape: Callable[..., Any], title: str, batch: int, length: int, new_tokens: int = 64,
    shortest: int | None = None, **options: Any,
) -> Generation:  # fmt: skip
    # Short runs vary more.
    more: dict[str, Any] = {"repetitions": 5, "shortest": shortest}
    return _call(f"small-{name}", shape, title, batch, length, new_tokens, {**_GREEDY, **options}, **more)


_SMALL_CALLS = [
    _small("gpt2-beam-p8", gpt2, "GPT-2, batch 4, 4 beams, prompt 8", 4, 8, num_beams=4),
    _small("gpt2-beam-p33", gpt2, "GPT-2, batch 4, 4 beams, prompt 33", 4, 33, num_beams=4),
    _small("gpt2-beam-b1-p64", gpt2, "GPT-2, batch 1, 4 beams, prompt 64", 1, 64, num_beams=4),
    _small("gpt2-beam2-padded", gpt2, "GPT-2, batch 8, 2 beams, prompts 4 to 64", 8, 64, shortest=4, num_beams=2),
    _small("gpt2-beam-sample", gpt2, "GPT-2, batch 4, 4 sampled beams, prompt 16", 4, 16, num_beams=4, do_sample=True),
    _small("gpt2-greedy-b1", gpt2, "GPT-2, batch 1, greedy, prompt 32", 1, 32, 128),
    _small("gpt2-greedy-b16", gpt2, "GPT-2, batch 16, greedy, prompt 32", 16, 32),
    _small("gpt2-sample16-b1", gpt2, "GPT-2, batch 1, 16 samples, prompt 32", 1, 32, do_sample=True,
           num_return_sequences=16),
    _small("bart-beam-s16", bart_base, "BART-base, batch 8, 4 beams, source 16", 8, 16, num_beams=4),
    _small("bart-beam-padded", bart_base, "BART-base, batch 8, 4 beams, sources 8 to 64", 8, 64, shortest=8,
           num_beams=4),
    _small("bart-greedy-s128", bart_base, "BART-base, batch 8, greedy, source 128", 8, 128, 96),
    _small("bart-greedy-b1", bart_base, "BART-base, batch 1, greedy, source 32, 3-grams", 1, 32, 128,
           no_repeat_ngram_size=3),
    _small("t5-small-beam-s64", t5_small, "T5-small, batch 8, 4 beams, source 64", 8, 64, num_beams=4),
    _small("t5-small-greedy", t5_small, "T5-small, batch 8, greedy, source 64", 8, 64, 128),
    _small("llama-small-beam-p40", llama_small, "Llama (8 layers), batch 4, 4 beams, prompt 40", 4, 40, num_beams=4),
]  # fmt: skip
_LARGE_CALLS = [
    _translation("b1", "1 sentence, 4 beams", 1, _BEAMS, _INT8),
    _translation("b8", "8 sentences, 4 beams", 8, _BEAMS),
    _translation("greedy-b1", "1 sentence, greedy", 1, _GREEDY),
    _call("bart-base-b4-s512", bart_base, "BART-base, batch 4, 4 beams, source 512", 4, 512, 64, _SUMMARY, _INT8,
          quick=True),
    _call("bart-base-b16-s1024", bart_base, "BART-base, batch 16, 4 beams, source 1024", 16, 1024, 64, _SUMMARY,
          (*_INT8, "openvino")),
    _call("bart-base-beam-cost", bart_base, "BART-base, batch 4, 8 beams, source 1024", 4, 1024, 64,
          {**_SUMMARY, "num_beams": 8}),
    _call("bart-base-b4-s1024", bart_base, "BART-base, batch 4, 1 beam, source 1024", 4, 1024, 64,
          {**_SUMMARY, "num_beams": 1}),
    _call("t5-base-b16-s128", t5_base, "T5-base, batch 16, 4 beams, source 128", 16, 128, 64, _BEAMS, _CT2),
    _call("gpt2-b4-p512", gpt2, "GPT-2, batch 4, 4 beams, prompt 512", 4, 512, 64, _BEAMS, _CT2, quick=True),
    _call("unilm-b4-s464", unilm_base, "UniLM-base, batch 4, 4 beams, source 464", 4, 464, 48, _BEAMS),
    _call("gpt2-sample4-b4-p512", gpt2, "GPT-2, batch 4, 4 samples each, prompt 512", 4, 512, 64,
          {"do_sample": True, "top_k": 50, "num_return_sequences": 4}),
    _call("llama-1b-beam-b4-p128", llama_1b, "Llama-1B, batch 4, 4 beams, prompt 128", 4, 128, 32, _BEAMS),
    _call("llama-1b-greedy-b16-p128", llama_1b, "Llama-1B, batch 16, greedy, prompt 128", 16, 128, 32, _GREEDY),
]  # fmt: skip
WORKLOADS = [*_SMALL_CALLS, *_LARGE_CALLS]
