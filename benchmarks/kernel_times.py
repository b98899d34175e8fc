"""Times of the kernels of a captured step, in a CUDA graph as there, against what copying their bytes takes.

    python -m benchmarks.kernel_times [--out FILE] [--seconds S]

The bandwidth is that of a large copy on the same GPU, bytes read and written. A row's floor is the bytes that its
kernel has to move at the least, over that; its share of the floor is 1 where it cannot be faster. Inputs take turns, so
that none is in a cache when it is read. Each row is checked against its reference first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import copy_bandwidth, seconds_of
from fastgen.ops import attention, best_candidates, kv_write, no_repeat_ngram, rms_norm
from fastgen.ops.gpu import grouped_linear

_LEAST_BYTES = 256 * 2**20  # in turn, before an input comes again: several times the cache of an H200


@dataclass
class Row:
    """What was found out about a kernel. Times are microseconds of one call."""

    name: str
    microseconds: float
    floor: float
    reference_microseconds: float | None
    error: float

    def __str__(self) -> str:
        other = "" if self.reference_microseconds is None else f", reference {self.reference_microseconds:.1f}"
        return f"{self.name}: {self.microseconds:.1f} us{other}, floor {self.floor:.1f} ({self.share:.2f} of it)"

    @property
    def share(self) -> float:
        """The part of the time that moving the bytes takes."""
        return self.floor / self.microseconds


@dataclass
class Case:
    """A kernel at one size. `make` gives a call, what it is compared with, and what both return."""

    name: str
    make: Callable[[], tuple[Callable[[], object], Callable[[], object] | None]]
    bytes: int
    tolerance: float = 2e-2


def attention_case(
    name: str, device: torch.device, dtype: torch.dtype, batch: int, per_input: int, kv_heads: int, group: int,
    dim: int, prefix: int, suffix: int = 0,
) -> Case:  # fmt: skip
    """A decoding step over a full prefix; histories of beams that swapped at every step."""
    rows, heads = batch * per_input, kv_heads * group
    ancestry = torch.arange(rows).view(batch, per_input, 1).expand(batch, per_input, suffix).reshape(rows, suffix)
    if suffix:
        # Every input's rows share all but the last few positions, as beams do.
        shared = torch.arange(batch).repeat_interleave(per_input).unsqueeze(1) * per_input
        ancestry = torch.where(torch.arange(suffix) < suffix - 10, shared, ancestry)
    read = int(torch.unique(ancestry + rows * torch.arange(suffix)).numel()) if suffix else 0
    elements = 2 * (batch * prefix + read) * kv_heads * dim + 2 * rows * heads * dim

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        def tensor(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        query, keys, values = (
            tensor(rows, heads, 1, dim),
            tensor(batch, kv_heads, prefix, dim),
            tensor(batch, kv_heads, prefix, dim),
        )
        parts: dict[str, Tensor] = {}
        if suffix:
            parts = {
                "suffix_keys": tensor(rows, kv_heads, suffix, dim),
                "suffix_values": tensor(rows, kv_heads, suffix, dim),
                "suffix_lengths": torch.tensor([suffix], device=device),
                "ancestry": ancestry.int().to(device),
            }
        return (
            lambda: attention.decode_attention(query, keys, values, **parts),
            lambda: attention.reference(query, keys, values, **parts),
        )

    return Case(f"attention, {name}", make, elements * dtype.itemsize)


def product_case(device: torch.device, dtype: torch.dtype, bits: int, rows: int, outputs: int, inputs: int) -> Case:
    """A linear layer on a low-bit weight, against torch's with the weight in floating point."""

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        floating = torch.randn(outputs, inputs, device=device, dtype=dtype)
        weight = grouped_linear.rounded(floating, bits, 64)
        every = torch.arange(outputs, device=device)
        floating.copy_(grouped_linear.rows(weight, every, dtype))
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        return lambda: grouped_linear.grouped_linear(x, weight), lambda: torch.nn.functional.linear(x, floating)

    moved = outputs * inputs * bits // 8 + outputs * inputs // 64 * 2 + (outputs + inputs) * rows * dtype.itemsize
    return Case(f"product, {rows} rows, {outputs} x {inputs} of {bits} bits", make, moved)


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    """All rows. `small` keeps the shapes and cuts their sizes, to try this out."""
    half = torch.float16 if device.type == "cuda" else torch.float32
    cut = 64 if small else 1
    for batch in (128, 32, 4):
        batch = max(batch // cut, 1)
        yield attention_case(
            f"BART-large cross, batch {batch}, 4 beams", device, half, batch, 4, 16, 1, 64, 1024 // min(cut, 32)
        )
    batch = max(32 // cut, 1)
    yield attention_case(
        f"GPT-2, batch {batch}, 4 beams, suffix 100", device, half, batch, 4, 12, 1, 64, 512 // min(cut, 32), 100 // cut
    )
    yield attention_case("Llama-7B, batch 1", device, half, 1, 1, 32 // min(cut, 8), 1, 128, 2048 // min(cut, 32))
    yield attention_case("Llama-8B, batch 1", device, half, 1, 1, 8, 4, 128, 4096 // min(cut, 32))

    width = 4096 // min(cut, 16)
    for bits, rows in ((4, 1), (4, 16), (4, 64), (8, 1), (8, 16)):
        yield product_case(device, half, bits, rows, 3 * width, width)

    rows, vocabulary, beams = 512 // cut, 50264 // cut, 4

    def make_candidates() -> tuple[Callable[[], object], Callable[[], object]]:
        scores, running = torch.randn(rows, vocabulary, device=device), torch.zeros(rows // beams, beams, device=device)
        return (
            lambda: best_candidates.best_continuations(scores, running, 2 * beams).scores,
            lambda: best_candidates.reference(scores, running, 2 * beams).scores,
        )

    yield Case(f"beam step, {rows} x {vocabulary}", make_candidates, rows * vocabulary * 4, 1e-3)

    width = 1024

    def make_norm() -> tuple[Callable[[], object], Callable[[], object]]:
        x, weight = (torch.randn(*shape, device=device, dtype=half) for shape in ((rows, width), (width,)))
        return lambda: rms_norm.rms_norm(x, weight), lambda: rms_norm.reference(x, weight, 1e-6)

    yield Case(f"RMS norm, {rows} x {width}", make_norm, 2 * rows * width * half.itemsize)

    def make_write() -> tuple[Callable[[], object], Callable[[], object]]:
        new = torch.randn(rows, 16, 64, device=device, dtype=half)
        caches = [torch.zeros(rows, 16, 144 // min(cut, 32), 64, device=device, dtype=half) for _ in range(4)]
        position = torch.tensor([2], device=device)
        first, second = caches[:2], caches[2:]

        def written(operator: Callable[..., None], into: list[Tensor]) -> Tensor:
            operator(new, new, *into, position)
            return into[0][:, :, 2]

        return lambda: written(kv_write.kv_write, first), lambda: written(kv_write.reference, second)

    yield Case(f"cache write, {rows} rows of 16 x 64", make_write, 4 * rows * 16 * 64 * half.itemsize)

    def make_ngram() -> tuple[Callable[[], object], Callable[[], object]]:
        scores = torch.randn(rows, vocabulary, device=device)
        other = scores.clone()
        tokens = torch.randint(0, 40, (rows, 140), device=device)
        lengths = torch.full((rows,), 140, device=device)
        return (
            lambda: no_repeat_ngram.no_repeat_ngram_(scores, tokens, 3, lengths),
            lambda: no_repeat_ngram.reference(other, tokens, lengths, 3),
        )

    yield Case(f"no-repeat 3-grams, {rows} rows, length 140", make_ngram, rows * 140 * 8, 0.0)


def measure(case: Case, device: torch.device, bytes_per_second: float) -> Row:
    """Checks and times one case.

    Raises:
        RuntimeError: the kernel's result is not that of its reference.
    """
    call, other = case.make()
    found = call()
    error, reference_time = 0.0, None
    if other is not None:
        wanted = other()
        assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
        found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
        # Banned tokens are minus infinity on both backends; as numbers they would swamp the others.
        found, wanted = (x.clamp(min=-1e4) for x in (found, wanted))
        error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not error <= case.tolerance:
            raise RuntimeError(f"{case.name}: off by {error:.2e}")
        reference_time = seconds_of([other], device) * 1e6
    calls = [call]
    if device.type == "cuda":
        turns = max(1, min(16, _LEAST_BYTES // max(case.bytes, 1)))
        calls += [case.make()[0] for _ in range(turns - 1)]
        # A graph of one short kernel would be timed with the start of the graph.
        calls *= max(1, 64 // len(calls))
    seconds = seconds_of(calls, device)
    return Row(case.name, seconds * 1e6, case.bytes / bytes_per_second * 1e6, reference_time, error)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_times", description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path, help="gets the rows as JSON")
    parser.add_argument("--seconds", type=float, default=600.0, help="no row is begun later (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="cut the sizes, to try this out")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    device = options.device
    torch.manual_seed(0)
    speed = copy_bandwidth(device, 2**20 if options.small else 2**31)
    print(f"copy: {speed / 1e9:.0f} GB/s")
    rows, failed = [], False
    with torch.no_grad():
        for case in cases(device, options.small):
            if time.monotonic() > end:
                print(f"{case.name}: no time left")
                continue
            try:
                row = measure(case, device, speed)
            except Exception as error:
                print(f"{case.name}: FAILED: {type(error).__name__}: {error}")
                failed = True
                continue
            print(row, flush=True)
            rows.append(row)
    if options.out is not None:
        found = {"copy_bytes_per_second": speed, "rows": [{**asdict(row), "share": row.share} for row in rows]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
