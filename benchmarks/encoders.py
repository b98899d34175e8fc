"""Encoders with and without padding: seconds of Transformers, FastGen and others, interleaved, and whether they agree.

    python -m benchmarks.encoders [--model FOLDER] [--only NAME ...] [--sides NAME ...] [--texts N] [--help]

FOLDER holds all-MiniLM-L6-v2 as sentence-transformers saves it, by default that of the installed package
(benchmarks/minilm.py). Without the package, and with `--layers`, the shape has random weights, and the row of
sentence-transformers is left out. Lengths of the mixture are 3 to 400 tokens, log-normal, 40 in the mean, in the order
they come. Padding is zero in the results (`padding="zero"`), as programs have it that look at real tokens alone.
Recorded passes are recorded before they are timed. OpenVINO and ONNX Runtime take part after `make bench-openvino` and
`make bench-onnxruntime`; `taskset -c 0,1` pins all processes to the same cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastgen
from benchmarks import encoder_sides
from benchmarks.backends.base import Unsupported
from benchmarks.encoder_sides import BASELINE, SIDES, SUBJECT, Batch, run
from benchmarks.machine import ROOT
from benchmarks.measure import alternate, format_seconds, timed
from benchmarks.minilm import unpacked
from fastgen import settings
from fastgen.ops import quantized_linear

Times = dict[str, list[float]]
FIRST_WORD, VOCABULARY = 1000, 20000
LONGEST, BATCH = 400, 32
SEED = 1
# Of the largest number: FastGen's promise, and what is taken for the same model in another library.
PROMISED, OTHERS_DIFFER = 1e-5, 1e-3


def mixture(count: int) -> list[int]:
    """Lengths of texts, 3 to 400 tokens, about 40 in the mean."""
    generator = random.Random(SEED)
    return [min(LONGEST, max(3, int(generator.lognormvariate(3.3, 0.9)))) for _ in range(count)]


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


def texts(lengths: list[int]) -> list[str]:
    """English texts of about these lengths in tokens."""
    words, start, found = (ROOT / "examples/data/heldout.src.txt").read_text().split(), 0, []
    for length in lengths:
        count = max(1, length - 2)  # a token at each end is none of the text
        found.append(" ".join(words[(start + n) % len(words)] for n in range(count)))
        start += count
    return found


def compared(model: Any, some: list[Batch], names: Sequence[str], repetitions: int) -> tuple[Times, float]:
    """Seconds of each side that takes part, and the largest difference of FastGen's numbers from those of Transformers.

    The difference is a part of the largest number, where that is above 1. Others must agree to `OTHERS_DIFFER`.

    Raises:
        RuntimeError: another library gives other results.
    """
    sides: dict[str, encoder_sides.Side] = {}
    try:
        for name in names:
            try:
                sides[name] = encoder_sides.make(name, model, some)
            except Unsupported as reason:
                print(f"{name} takes no part: {reason}", file=sys.stderr)
                continue
            sides[name].run()  # a warm-up
        found = {name: side.states() for name, side in sides.items()}
        for name in found.keys() - {SUBJECT}:
            if not (difference := _difference(found[BASELINE], found[name])) <= OTHERS_DIFFER:  # NaN is no agreement
                raise RuntimeError(f"the results of {name} differ from those of {BASELINE} by {difference:.1e}")
        runs = {name: lambda side=side: timed(side.run) for name, side in sides.items()}
        times = {name: [seconds for seconds, _ in each] for name, each in alternate(runs, repetitions).items()}
        return times, _difference(found[BASELINE], found[SUBJECT])
    finally:
        for side in sides.values():
            side.close()


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """NaN where one of them has it."""
    pairs = zip(expected, found, strict=True)
    # Not Python's `max`, which keeps a number that comes before NaN.
    return float(torch.stack([(a - b).abs().max() / a.abs().max().clamp(min=1.0) for a, b in pairs]).max())


def sentences(folder: Path, count: int, repetitions: int) -> tuple[Times, float]:
    """The same of sentence-transformers' `encode`, which sorts texts by length."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = LONGEST
    some = texts(mixture(count))

    def encode(side: str) -> torch.Tensor:
        if side == BASELINE:
            with fastgen.disabled():
                return torch.from_numpy(model.encode(some, batch_size=BATCH, show_progress_bar=False))
        return torch.from_numpy(model.encode(some, batch_size=BATCH, show_progress_bar=False))

    expected, found = (encode(side) for side in (BASELINE, SUBJECT))
    runs = {side: lambda side=side: timed(lambda: encode(side)) for side in (BASELINE, SUBJECT)}
    times = {side: [seconds for seconds, _ in each] for side, each in alternate(runs, repetitions).items()}
    return times, _difference([expected], [found])


def _rows(options: argparse.Namespace) -> dict[str, Callable[[], tuple[Any, list[Batch]]]]:
    layers, count = options.layers, options.texts
    one = {
        f"latency-{length}": lambda length=length: (minilm(options.model, layers), batches([length], 1) * 20)
        for length in (10, 40, 200)
    }
    shapes = {
        f"{kind.lower()}-base": lambda kind=kind: (base(kind, layers), batches(uniform(20), 20))
        for kind in ("Bert", "Albert", "DistilBert")
    }
    mixed = {"minilm": lambda: (minilm(options.model, layers), batches(mixture(count), BATCH))}
    return {**mixed, **shapes, **one}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="all-MiniLM-L6-v2 (default: the installed package, or its shape)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="rows: minilm, sentences, bert-base, latency-10, int8, ..."
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="NAME", help=", ".join(SIDES))
    parser.add_argument("--threads", type=int, metavar="N", help="of every side (default: as torch has)")
    parser.add_argument("--texts", type=int, default=320, metavar="N", help="of the mixture (default: 320)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each side (default: 3)")
    parser.add_argument("--layers", type=int, metavar="N", help="of random models (default: as their kind has)")
    return parser


def _int8(options: argparse.Namespace) -> None:
    reason = quantized_linear.unavailable("int8")
    if reason is not None:  # both sides would be float32
        print(f"| int8 of FastGen | not measured: {reason} | | |", flush=True)
        return
    model, some = minilm(options.model, options.layers), batches(mixture(min(options.texts, 160)), BATCH)
    run(model, some, SUBJECT)

    def rounded() -> tuple[float, Any]:
        with settings.changed(weight_dtype="int8", packed_weights="keep"):
            return timed(lambda: run(model, some, SUBJECT))

    rounded()  # its weights are packed
    runs = {"float32": lambda: timed(lambda: run(model, some, SUBJECT)), SUBJECT: rounded}
    found = alternate(runs, options.repetitions)
    _print_row("int8 of FastGen", {name: [seconds for seconds, _ in each] for name, each in found.items()}, "")


def _print_row(name: str, times: Times, difference: str) -> None:
    """Medians, and how many times as fast as each other side FastGen is: of medians, and of runs after each other."""
    medians = ", ".join(f"{side} {format_seconds(statistics.median(each))}" for side, each in times.items())
    ratios = []
    for side in times.keys() - {SUBJECT}:
        pairs = [one / other for one, other in zip(times[side], times[SUBJECT], strict=True)]
        ratio = statistics.median(times[side]) / statistics.median(times[SUBJECT])
        ratios.append(f"{ratio:.2f} x {side} ({min(pairs):.2f} to {max(pairs):.2f})")
    print(f"| {name} | {medians} | {', '.join(sorted(ratios))} | {difference} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table in Markdown. Returns 1 if results differ by more than 1e-5 of the largest number, else 0."""
    options = _parser().parse_args(arguments)
    fastgen.enable(padding="zero")
    torch.manual_seed(SEED)
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        if options.model is None and options.layers is None:
            options.model = unpacked(Path(temporary))
        return _measured(options)


def _measured(options: argparse.Namespace) -> int:
    wanted, are_same = options.only, True
    names = [side for side in SIDES if side in {*options.sides, BASELINE, SUBJECT}]
    print("| | medians of the times | FastGen is | largest difference |\n| --- | --- | --- | --- |", flush=True)

    def show(name: str, found: tuple[Times, float]) -> None:
        nonlocal are_same
        times, difference = found
        _print_row(name, times, f"{difference:.1e}")
        are_same = are_same and difference <= PROMISED

    for name, make in _rows(options).items():
        if not wanted or name in wanted:
            show(name, compared(*make(), names, options.repetitions))
    if options.model and (not wanted or "sentences" in wanted):
        show("sentences", sentences(options.model, options.texts, options.repetitions))
    if not wanted or "int8" in wanted:
        _int8(options)
    return 0 if are_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
