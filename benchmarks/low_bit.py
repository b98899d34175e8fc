"""A GGUF file whose bits are kept, beside other libraries and the same model in 16 and 32 bits.

    python -m benchmarks.low_bit FOLDER [--only ROW ...] [--activations float|int8] [--repetitions N] [--threads N]

FOLDER is what `python -m benchmarks.smollm2 FOLDER` has made. Sides are interleaved, with captured steps. A row has the
medians of their times, and how many times as fast the first side is, with the range of pairs of runs. llama.cpp needs
the environment of `make bench-llama`, OpenVINO GenAI that of `make bench-openvino`.

| row | what |
| --- | --- |
| file | activations in float and in 8 bits, llama.cpp, OpenVINO GenAI: a prompt of 40 tokens, 64 new ones |
| greedy-1, greedy-16, beams-4x4 | kept bits, weights rounded to bfloat16 and held in float32, unpacked weights |
| perplexity | of the example text, in float32, with `weight_dtype="int8"`, and with the weights of the file |

The rows of chats also say how many sequences of tokens are those of the unpacked model by the original code. `python -m
benchmarks.low_bit_memory` tells what the process holds.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks import smollm2
from benchmarks.backends import elsewhere, llama_cpp
from benchmarks.machine import ROOT
from benchmarks.measure import alternate, format_seconds, timed
from benchmarks.workloads.smollm2_chat import chat_prompts
from fastgen import settings
from fastgen.optimizer.transformers.call import fast_layers

_TEXT = ROOT / "examples" / "data" / "heldout.ref.txt"
_LINES = 250  # the other half is what weights are calibrated on (docs/quantize.md)
_WINDOW = 1024  # tokens that are predicted from each other
_OPENVINO_GENAI = Path(llama_cpp.__file__).with_name("openvino_genai_process.py")
_PROMPT, _NEW_TOKENS, _NEW_TOKENS_OF_CHATS = 40, 64, 96
CHATS = {"greedy-1": (1, 1), "greedy-16": (16, 1), "beams-4x4": (4, 4)}  # inputs and beams


def prompt(model: Any, length: int) -> Tensor:
    """[1, length] of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(10, model.config.vocab_size - 10, (1, length), generator=generator)


def generate(model: Any, inputs: dict[str, Tensor], count: int, beams: int = 1) -> Tensor:
    lengths = {"max_new_tokens": count, "min_new_tokens": count}
    found: Tensor = model.generate(**inputs, num_beams=beams, do_sample=False, pad_token_id=0, **lengths)
    return found


class OtherLibrary:
    """A library in a process of its own, which reads a GGUF file and makes greedy tokens of a prompt."""

    def __init__(self, name: str, environment: str, script: Path, **question: Any) -> None:
        self._process = elsewhere.Process(name, elsewhere.python_of(environment, name), script)
        self._process.ask({**question, "folder": str(self._process.folder), "threads": torch.get_num_threads()})

    def __enter__(self) -> OtherLibrary:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.close()

    def generate(self, count: int) -> Any:
        return self._process.ask({"new_tokens": count})


def compared(sides: dict[str, Callable[[], Any]], repetitions: int) -> str:
    """Medians of all sides, and how many times as fast as each other one the first one is."""
    for run in sides.values():
        for _ in range(3):  # steps are recorded, and copies of weights made
            run()
    found = alternate({name: partial(timed, run) for name, run in sides.items()}, repetitions)
    times = {name: [seconds for seconds, _ in runs] for name, runs in found.items()}
    medians = {name: statistics.median(each) for name, each in times.items()}
    first, *others = times
    parts = []
    for name in others:
        pairs = [other / one for one, other in zip(times[first], times[name], strict=True)]
        ratio = medians[name] / medians[first]
        parts.append(f"{ratio:.2f} times as fast as {name} ({min(pairs):.2f} to {max(pairs):.2f})")
    return f"{', '.join(f'{name} {format_seconds(each)}' for name, each in medians.items())}: {', '.join(parts)}"


def file_row(given: argparse.Namespace) -> Iterator[str]:
    for activations in ("float", "int8"):
        keep = fastgen.KeepBits(activations=activations)
        model = _loaded(given.folder, gguf_file=smollm2.GGUF, quantization_config=keep)
        yield f"activations in {activations}: {_against_others(model, given.folder / smollm2.GGUF, given.repetitions)}"


def _against_others(model: Any, file: Path, repetitions: int) -> str:
    tokens, end = prompt(model, _PROMPT), model.generation_config.eos_token_id
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    question = {"file": str(file), "precision": "Q4_1", "new_tokens": _NEW_TOKENS}
    question |= {"inputs": {name: each.tolist() for name, each in inputs.items()}}
    question |= {"end": end if isinstance(end, list) else [end]}
    others = {"llama.cpp": ("llama", llama_cpp.LlamaCpp.script), "OpenVINO GenAI": ("openvino", _OPENVINO_GENAI)}
    sides: dict[str, Callable[[], Any]] = {"FastGen": partial(generate, model, inputs, _NEW_TOKENS)}
    missing = []
    with ExitStack() as stack:
        for name, started in others.items():
            try:
                other = stack.enter_context(OtherLibrary(name, *started, **question))
            except elsewhere.Unsupported as reason:
                missing.append(f"; {name} not measured, {reason}")
                continue
            sides[name] = partial(other.generate, _NEW_TOKENS)
        return compared(sides, repetitions) + "".join(missing)


def chat_row(name: str, given: argparse.Namespace) -> Iterator[str]:
    batch, beams = CHATS[name]
    rounded = _loaded(given.folder, gguf_file=smollm2.GGUF)
    for weight in rounded.parameters():
        weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
    keep = fastgen.KeepBits(activations=given.activations)
    models = {
        "kept": _loaded(given.folder, gguf_file=smollm2.GGUF, quantization_config=keep),
        "16 bits": rounded,
        "unpacked": _loaded(given.folder, gguf_file=smollm2.GGUF),
    }
    inputs = chat_prompts(given.folder, batch)
    sides = {side: partial(generate, model, inputs, _NEW_TOKENS_OF_CHATS, beams) for side, model in models.items()}
    yield compared(sides, given.repetitions)
    with fastgen.disabled():
        expected = sides["unpacked"]()
    same = ", ".join(f"{side} {int((sides[side]() == expected).all(dim=1).sum())}" for side in ("kept", "unpacked"))
    yield f"of {batch} outputs, those of Transformers: {same}"


def perplexity(model: Any, tokens: Tensor, **settings_of_side: Any) -> float:
    """Of [1, n] tokens, in pieces. Inputs are rounded as in generation."""
    total = 0.0
    with settings.changed(packed_weights="keep", **settings_of_side), torch.inference_mode(), fast_layers(model):
        for piece in tokens.split(_WINDOW, dim=1):
            logits = model(input_ids=piece, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
    return math.exp(total / (tokens.shape[1] - len(tokens.split(_WINDOW, dim=1))))


def perplexity_row(given: argparse.Namespace) -> Iterator[str]:
    from transformers import AutoTokenizer

    text = "\n".join(_TEXT.read_text(encoding="utf-8").splitlines()[-_LINES:])
    tokens = AutoTokenizer.from_pretrained(given.folder)(text, return_tensors="pt").input_ids
    model = _loaded(given.folder)
    exact = perplexity(model, tokens)
    yield f"float32: {exact:.3f} ({tokens.shape[1]} tokens)"
    for size in (64, 32):
        found = perplexity(model, tokens, weight_dtype="int8", weight_group_size=size)
        yield f"int8, groups of {size}: {found:.3f}, {found / exact - 1:+.2%}"
    kept = _loaded(given.folder, gguf_file=smollm2.GGUF, quantization_config=fastgen.KeepBits())
    for activations in ("float", "int8"):
        found = perplexity(kept, tokens, activations=activations)
        yield f"the file's weights, activations in {activations}: {found:.3f}, {found / exact - 1:+.2%}"


def _loaded(folder: Path, **named: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).eval()


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "file": file_row,
    **{name: partial(chat_row, name) for name in CHATS},
    "perplexity": perplexity_row,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_bit", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help=f"as `{smollm2.__name__}` makes it")
    names = list(ROWS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--activations", choices=("float", "int8"), default="float", help="of kept weights in chats")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch and the other libraries (default: torch's)")
    given = parser.parse_args(arguments)
    fastgen.enable(captured_step="always")
    if given.threads:
        torch.set_num_threads(given.threads)
    for name in given.only:
        for line in ROWS[name](given):
            print(f"{name}: {line}", flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
