"""Encoders with and without padding: seconds of Transformers and of FastGen, in turn, and whether the results agree.

    python -m benchmarks.encoders [--model FOLDER] [--only NAME ...] [--texts N] [--repetitions N] [--layers N] [--help]

FOLDER holds all-MiniLM-L6-v2 as sentence-transformers saves it; without it, the shape has random weights. Lengths of
the mixture are 3 to 400 tokens, log-normal, in the order they come. Padding is zero in the results (`padding="zero"`),
as programs have it that look at real tokens alone. Recorded passes are recorded before they are timed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastgen
from benchmarks.measure import alternate, timed
from benchmarks.memory import PeakMemory
from fastgen import settings
from fastgen.optimizer.transformers.encoders import programs

Batch = dict[str, torch.Tensor]
SIDES = ("transformers", "fastgen")
FIRST_WORD, VOCABULARY = 1000, 20000
SEED = 1


def mixture(count: int) -> list[int]:
    """Lengths of texts, 3 to 400 tokens, about 40 in the mean."""
    generator = random.Random(SEED)
    return [min(400, max(3, int(generator.lognormvariate(3.3, 0.9)))) for _ in range(count)]


def uniform(count: int) -> list[int]:
    """Lengths from 2 to 100 tokens (Fang et al., "TurboTransformers", PPoPP 2021, section 6)."""
    generator = random.Random(SEED)
    return [generator.randint(2, 100) for _ in range(count)]


def batches(lengths: list[int], size: int) -> list[Batch]:
    """Padded batches of random tokens."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for start in range(0, len(lengths), size):
        some = torch.tensor(lengths[start : start + size])
        mask = (torch.arange(int(some.max())) < some.unsqueeze(1)).long()
        ids = torch.randint(FIRST_WORD, VOCABULARY, mask.shape, generator=generator)
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


def minilm(folder: Path | None, layers: int | None) -> Any:
    import transformers

    if folder is not None:
        return transformers.AutoModel.from_pretrained(folder).eval()
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": layers or 6}
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


def base(kind: str, layers: int | None) -> Any:
    """A model of the shape that carries the name of its kind: random weights, 12 layers (DistilBERT: 6)."""
    import transformers

    config = getattr(transformers, f"{kind}Config")
    large = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072} if kind == "Albert" else {}
    depth = {"n_layers" if kind == "DistilBert" else "num_hidden_layers": layers} if layers else {}
    return getattr(transformers, f"{kind}Model")(config(**large, **depth)).eval()


def run(model: Any, some: list[Batch], side: str) -> list[torch.Tensor]:
    """The states at real tokens, of each batch."""
    with torch.inference_mode():
        if side == "transformers":
            with fastgen.disabled():
                return [model(**batch).last_hidden_state[batch["attention_mask"].bool()] for batch in some]
        return [model(**batch).last_hidden_state[batch["attention_mask"].bool()] for batch in some]


def compared(model: Any, some: list[Batch], repetitions: int) -> tuple[dict[str, float], float]:
    """Median seconds of each side, and the largest difference of two numbers, as a part of the largest."""
    sides: dict[str, Callable[[], tuple[float, Any]]] = {
        side: lambda side=side: timed(lambda: run(model, some, side)) for side in SIDES
    }
    expected, found = (run(model, some, side) for side in SIDES)
    difference = max(
        float((a - b).abs().max()) / max(1.0, float(a.abs().max())) for a, b in zip(expected, found, strict=True)
    )
    if len(some) > 1 and all(some[0] is each for each in some):  # as often as a pass must have come to be recorded
        for _ in range(-(-programs.PAYS_FROM // len(some))):
            run(model, some, "fastgen")
    results = alternate(sides, repetitions)
    return {side: statistics.median(seconds for seconds, _ in results[side]) for side in SIDES}, difference


def peak(model: Any, some: list[Batch], side: str) -> int:
    """Bytes of this process at its peak, beyond those before the batches."""
    run(model, batches([3], 1), side)
    with PeakMemory(torch.device("cpu")) as memory:
        run(model, some, side)
    return memory.bytes or 0


def _rows(options: argparse.Namespace) -> dict[str, Callable[[], tuple[Any, list[Batch]]]]:
    layers, texts = options.layers, options.texts
    one = {
        f"latency-{length}": lambda length=length: (minilm(options.model, layers), batches([length], 1) * 20)
        for length in (10, 40, 200)
    }
    shapes = {
        f"{kind.lower()}-base": lambda kind=kind: (base(kind, layers), batches(uniform(20), 20))
        for kind in ("Bert", "Albert", "DistilBert")
    }
    mixed = {"minilm": lambda: (minilm(options.model, layers), batches(mixture(texts), 32))}
    return {**mixed, **shapes, **one}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="all-MiniLM-L6-v2 (default: its shape)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="rows: minilm, bert-base, latency-10, int8, memory, ..."
    )
    parser.add_argument("--texts", type=int, default=320, metavar="N", help="of the mixture (default: 320)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each side (default: 3)")
    parser.add_argument("--layers", type=int, metavar="N", help="of random models (default: as their kind has)")
    parser.add_argument("--peak-of", choices=SIDES, help=argparse.SUPPRESS)
    return parser


def _int8(options: argparse.Namespace) -> None:
    model, some = minilm(options.model, options.layers), batches(mixture(min(options.texts, 160)), 32)
    run(model, some, "fastgen")
    exact, _ = timed(lambda: run(model, some, "fastgen"))
    with settings.changed(weight_dtype="int8", packed_weights="keep"):
        run(model, some, "fastgen")
        rounded, _ = timed(lambda: run(model, some, "fastgen"))
    print(f"| int8 | {exact:.4f} (float32) | {rounded:.4f} | {exact / rounded:.2f} | |", flush=True)


def _memory(arguments: Sequence[str]) -> None:
    """Each side in a process of its own."""
    found = []
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.encoders", *arguments, "--peak-of", side]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
        found.append(int(done.stdout.split()[-1]))
    print(
        f"| memory, MiB | {found[0] / 2**20:.1f} | {found[1] / 2**20:.1f} | {found[0] / max(found[1], 1):.2f} | |",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table in Markdown. Returns 1 if results differ by more than 1e-5 of the largest number, else 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    fastgen.enable(padding="zero")
    torch.manual_seed(SEED)
    if options.peak_of:
        print(peak(minilm(options.model, options.layers), batches(mixture(options.texts), 32), options.peak_of))
        return 0
    wanted, are_same = options.only, True
    print("| | Transformers, s | FastGen, s | times as fast | largest difference |\n| --- | --- | --- | --- | --- |")
    for name, make in _rows(options).items():
        if wanted and name not in wanted:
            continue
        model, some = make()
        seconds, difference = compared(model, some, options.repetitions)
        one, other = (seconds[side] for side in SIDES)
        print(f"| {name} | {one:.4f} | {other:.4f} | {one / other:.2f} | {difference:.1e} |", flush=True)
        are_same = are_same and difference <= 1e-5
    if not wanted or "int8" in wanted:
        _int8(options)
    if not wanted or "memory" in wanted:
        _memory(arguments)
    return 0 if are_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
