"""One call of each kind of model, in the shape of a well-known one: summaries, translations, long prompts, samples."""

from __future__ import annotations

from typing import Any

from benchmarks.record import Target
from benchmarks.workload import NEVER_SLOWER, Generation, Workload, faster_on_cpu, faster_than
from benchmarks.workloads.beam_cost import BeamCost
from benchmarks.workloads.shapes import bart_base, gpt2, llama_1b, opus_mt, t5_base, unilm_base

_GREEDY, _BEAMS = {"do_sample": False}, {"num_beams": 4, "do_sample": False}
_SUMMARY = {**_BEAMS, "no_repeat_ngram_size": 3}
_INT8 = ("ctranslate2-int8", "fastgen-int8")


def _translation(name: str, title: str, batch: int, options: dict[str, Any], *targets: Target) -> Generation:
    """Sentences in the shape of opus-mt; in 8 bits, too, where a target compares that."""
    in_int8 = any(target.metric == "/".join(_INT8) for target in targets)
    return Generation(
        name=f"opus-mt-{name}",
        title=f"opus-mt, {title}, source 32",
        shape=opus_mt,
        batch=batch,
        length=32,
        new_tokens=32,
        options=options,
        repetitions=7,
        memory=False,
        further_backends=("fastgen-hooks", "ctranslate2", *(_INT8 if in_int8 else ())),
        targets=(NEVER_SLOWER, *targets),
    )


WORKLOADS: list[Workload] = [
    _translation(
        *("b1", "1 sentence, 4 beams", 1, _BEAMS),
        *(faster_on_cpu(4.5), faster_than("ctranslate2", 3), faster_than(_INT8[0], 1.8, _INT8[1])),
    ),
    _translation("b8", "8 sentences, 4 beams", 8, _BEAMS, faster_on_cpu(3.5), faster_than("ctranslate2", 3.2)),
    _translation("greedy-b1", "1 sentence, greedy", 1, _GREEDY, faster_on_cpu(3.5), faster_than("ctranslate2", 1.9)),
    Generation(
        name="bart-base-b4-s512",
        title="BART-base, batch 4, 4 beams, source 512",
        shape=bart_base,
        batch=4,
        length=512,
        new_tokens=64,
        options=_SUMMARY,
        further_backends=("ctranslate2", *_INT8),
        quick=True,
        quick_memory=True,
        targets=(
            NEVER_SLOWER,
            faster_on_cpu(4.2),
            faster_than("ctranslate2", 2.4),
            faster_than(_INT8[0], 1.3, _INT8[1]),
        ),
    ),
    Generation(
        name="bart-base-b16-s1024",
        title="BART-base, batch 16, 4 beams, source 1024",
        shape=bart_base,
        batch=16,
        length=1024,
        new_tokens=64,
        options=_SUMMARY,
        further_backends=("ctranslate2", *_INT8, "openvino"),
        targets=(
            faster_on_cpu(8),
            faster_than("ctranslate2", 1.5),
            faster_than("openvino", 3),
            faster_than(_INT8[0], 1.3, _INT8[1]),
            Target("K/V memory, as a part of unpatched", "kv_ratio", at_most=0.3),
        ),
    ),
    BeamCost(
        name="bart-base-beam-cost",
        title="BART-base, batch 4, 8 beams and 1, source 1024",
        work=Generation(
            name="bart-base-b4-s1024",
            title="BART-base, batch 4, source 1024",
            shape=bart_base,
            batch=4,
            length=1024,
            new_tokens=64,
            options={**_SUMMARY, "num_beams": 1},
        ),
        targets=(Target("time at 8 beams over time at 1", "cost fastgen", at_most=3.5), NEVER_SLOWER),
    ),
    Generation(
        name="t5-base-b16-s128",
        title="T5-base, batch 16, 4 beams, source 128",
        shape=t5_base,
        batch=16,
        length=128,
        new_tokens=64,
        options=_BEAMS,
        further_backends=("ctranslate2",),
        targets=(NEVER_SLOWER, faster_on_cpu(3.6), faster_than("ctranslate2", 1.7)),
    ),
    Generation(
        name="gpt2-b4-p512",
        title="GPT-2, batch 4, 4 beams, prompt 512",
        shape=gpt2,
        batch=4,
        length=512,
        new_tokens=64,
        options=_BEAMS,
        quick=True,
        further_backends=("ctranslate2",),
        targets=(faster_on_cpu(9),),
    ),
    Generation(
        name="unilm-b4-s464",
        title="UniLM-base, batch 4, 4 beams, source 464",
        shape=unilm_base,
        batch=4,
        length=464,
        new_tokens=48,
        options=_BEAMS,
        targets=(faster_on_cpu(6),),
    ),
    Generation(
        name="gpt2-sample4-b4-p512",
        title="GPT-2, batch 4, 4 samples each, prompt 512",
        shape=gpt2,
        batch=4,
        length=512,
        new_tokens=64,
        options={"do_sample": True, "top_k": 50, "num_return_sequences": 4},
        targets=(NEVER_SLOWER,),
    ),
    Generation(
        name="llama-1b-beam-b4-p128",
        title="Llama-1B, batch 4, 4 beams, prompt 128",
        shape=llama_1b,
        batch=4,
        length=128,
        new_tokens=32,
        options=_BEAMS,
        targets=(NEVER_SLOWER,),
    ),
    Generation(
        name="llama-1b-greedy-b16-p128",
        title="Llama-1B, batch 16, greedy, prompt 128",
        shape=llama_1b,
        batch=16,
        length=128,
        new_tokens=32,
        options=_GREEDY,
        targets=(NEVER_SLOWER, faster_on_cpu(2.2)),
    ),
]
