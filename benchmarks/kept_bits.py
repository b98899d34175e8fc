"""A GGUF file whose bits are kept beside the same model in 16 bits: greedy search with 1 and 16 sequences, and beams.

    python -m benchmarks.kept_bits FOLDER [--only ROW ...] [--activations float|int8] [--repetitions N] [--threads N]

FOLDER is what `python -m benchmarks.smollm2 FOLDER` has made. Sides run in turn, with captured steps:

| side | what |
| --- | --- |
| kept | the blocks of the file, `quantization_config=KeepBits(...)` |
| 16 bits | the weights of the file rounded to bfloat16 and held in float32, of which captured steps read 16 bits |
| unpacked | the weights of the file as Transformers unpacks them to float32 |

A row has the median of each side and how many times as fast the first one is, with the range of pairs of runs. It also
says how many sequences of tokens are those of the unpacked model by the original code. `python -m
benchmarks.few_bits_memory` tells what the process holds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks import smollm2
from benchmarks.measure import alternate, format_seconds, timed
from benchmarks.workloads.smollm2_chat import QUESTIONS

ROWS = {"greedy-1": (1, 1), "greedy-16": (16, 1), "beams-4x4": (4, 4)}
_NEW_TOKENS = 96


def inputs_of(folder: Path, count: int) -> dict[str, Tensor]:
    """Prompts of 30 to 40 tokens, padded on the left."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


def models_of(folder: Path, activations: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    def load(**named: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=smollm2.GGUF, **named).eval()

    rounded = load()
    for weight in rounded.parameters():
        weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
    kept = load(quantization_config=fastgen.KeepBits(activations=activations))
    return {"kept": kept, "16 bits": rounded, "unpacked": load()}


def generate(model: Any, inputs: dict[str, Tensor], beams: int) -> Tensor:
    lengths = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS}
    found: Tensor = model.generate(**inputs, num_beams=beams, do_sample=False, pad_token_id=0, **lengths)
    return found


def measured(sides: dict[str, Callable[[], Tensor]], repetitions: int) -> str:
    """Medians, and how many times as fast the first side is."""
    for run in sides.values():
        for _ in range(3):  # steps are recorded, and copies of weights made
            run()
    found = alternate({name: partial(timed, run) for name, run in sides.items()}, repetitions)
    times = {name: [seconds for seconds, _ in runs] for name, runs in found.items()}
    first, *others = times
    parts = [f"{name} {format_seconds(statistics.median(each))}" for name, each in times.items()]
    for name in others:
        ratios = [other / one for one, other in zip(times[first], times[name], strict=True)]
        ratio = statistics.median(times[name]) / statistics.median(times[first])
        parts.append(f"{ratio:.2f} times as fast as {name} ({min(ratios):.2f} to {max(ratios):.2f})")
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_bits", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help=f"as `{smollm2.__name__}` makes it")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--activations", choices=("float", "int8"), default="float", help="of the kept weights")
    parser.add_argument("--repetitions", type=int, default=7, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own)")
    given = parser.parse_args(arguments)
    fastgen.enable(captured_step="always")
    if given.threads:
        torch.set_num_threads(given.threads)
    models = models_of(given.folder, given.activations)
    for row in given.only:
        batch, beams = ROWS[row]
        inputs = inputs_of(given.folder, batch)
        sides = {name: partial(generate, model, inputs, beams) for name, model in models.items()}
        print(f"{row}: {measured(sides, given.repetitions)}", flush=True)
        with fastgen.disabled():
            expected = sides["unpacked"]()
        same = {name: int((sides[name]() == expected).all(dim=1).sum()) for name in ("kept", "unpacked")}
        print(f"{row}: of {batch} outputs, those of Transformers: " + ", ".join(f"{n} {s}" for n, s in same.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
