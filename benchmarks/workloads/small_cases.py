"""Cases with little to gain, for the promise that no accelerated case is slower.

Short prompts and sources, few rows, no beams, lengths just on either side of what is worth sharing, padded batches. The
sizes are such that an unpatched run takes over a second on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.workload import NEVER_SLOWER, Generation
from benchmarks.workloads.shapes import bart_base, gpt2, llama_small, t5_small


def _case(
    name: str,
    title: str,
    shape: Callable[..., Any],
    batch: int,
    length: int,
    new_tokens: int = 64,
    shortest: int | None = None,
    **options: Any,
) -> Generation:
    return Generation(
        name=f"small-{name}",
        title=title,
        shape=shape,
        batch=batch,
        length=length,
        shortest=shortest,
        new_tokens=new_tokens,
        options={"do_sample": False, **options},
        # Short runs vary more.
        repetitions=5,
        memory=False,
        targets=(NEVER_SLOWER,),
    )


WORKLOADS = [
    _case("gpt2-beam-p8", "GPT-2, batch 4, 4 beams, prompt 8", gpt2, 4, 8, num_beams=4),
    _case("gpt2-beam-p33", "GPT-2, batch 4, 4 beams, prompt 33", gpt2, 4, 33, num_beams=4),
    _case("gpt2-beam-b1-p64", "GPT-2, batch 1, 4 beams, prompt 64", gpt2, 1, 64, num_beams=4),
    _case("gpt2-beam2-padded", "GPT-2, batch 8, 2 beams, prompts 4 to 64", gpt2, 8, 64, shortest=4, num_beams=2),
    _case("gpt2-beam-sample", "GPT-2, batch 4, 4 sampled beams, prompt 16", gpt2, 4, 16, num_beams=4, do_sample=True),
    _case("gpt2-greedy-b1", "GPT-2, batch 1, greedy, prompt 32", gpt2, 1, 32, new_tokens=128),
    _case("gpt2-greedy-b16", "GPT-2, batch 16, greedy, prompt 32", gpt2, 16, 32),
    _case(
        "gpt2-sample16-b1",
        "GPT-2, batch 1, 16 samples, prompt 32",
        gpt2,
        1,
        32,
        do_sample=True,
        num_return_sequences=16,
    ),
    _case("bart-beam-s16", "BART-base, batch 8, 4 beams, source 16", bart_base, 8, 16, num_beams=4),
    _case(
        "bart-beam-padded", "BART-base, batch 8, 4 beams, sources 8 to 64", bart_base, 8, 64, shortest=8, num_beams=4
    ),
    _case("bart-greedy-s128", "BART-base, batch 8, greedy, source 128", bart_base, 8, 128, new_tokens=96),
    _case(
        "bart-greedy-b1",
        "BART-base, batch 1, greedy, source 32, 3-grams",
        bart_base,
        1,
        32,
        128,
        no_repeat_ngram_size=3,
    ),
    _case("t5-small-beam-s64", "T5-small, batch 8, 4 beams, source 64", t5_small, 8, 64, num_beams=4),
    _case("t5-small-greedy", "T5-small, batch 8, greedy, source 64", t5_small, 8, 64, new_tokens=128),
    _case("llama-small-beam-p40", "Llama (8 layers), batch 4, 4 beams, prompt 40", llama_small, 4, 40, num_beams=4),
]
