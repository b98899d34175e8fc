"""`python -m fastgen tune`: measures a machine, and writes the profile that replaces the shipped table.

For each type and layout, the kernels run interleaved on weights that come from memory, as a model's weights do in a
decode step. The profile is a file of numbers and names for this kind of processor (`choose.profile_path`); removing it
restores the shipped table. Nothing in this module runs in a user's call.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.linear import choose, copies
from fastgen.ops.linear.choose import KERNELS, PANELS, SERVE, TORCH, Isa, Key, Layout

# The M that are measured, and [N, K] of the weights.
_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 15, 16, 20, 24, 32, 48, 64, 128, 256)
_SHAPES = ((768, 768), (3072, 768), (768, 3072))
# Rounds of each; bytes of the weights that a round goes through, so that no cache holds them.
_ROUNDS, _BYTES = 5, 2**25
# From this M on, a kernel that is so many times slower than one that takes over from it is not measured any more.
_MANY_ROWS, _FAR_FASTER = 8, 4
Seconds = dict[str, float]


def main() -> int:
    """Measures, writes, and prints the table; returns the exit status."""
    isa, path = choose.instruction_set(), choose.profile_path()
    if isa is Isa.PORTABLE:
        print(f"fastgen: there is nothing to tune: {choose.backend()}", file=sys.stderr)
        return 1
    if path is None:
        print("fastgen: FASTGEN_CACHE is empty: name a folder for the profile", file=sys.stderr)
        return 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError("the folder cannot be written to")
    except OSError as error:
        print(f"fastgen: {path} cannot be written: {error}", file=sys.stderr)
        return 1
    print(
        f"Measuring {choose.machine(isa)} with {torch.get_num_threads()} threads: about a minute. Let nothing else run."
    )
    try:
        profile = {_name(key): table(names, measured(key, isa)) for key, names in SERVE.items()}
    except KeyboardInterrupt:
        print("fastgen: interrupted; nothing was written", file=sys.stderr)
        return 130
    for name, row in profile.items():
        print(f"{name:18}", ", ".join(_words(*each) for each in row))
    try:
        write(path, choose.machine(isa), profile)
    except OSError as error:
        print(f"fastgen: {path} cannot be written: {error}", file=sys.stderr)
        return 1
    choose.forget()
    print(f"Written to {path}. Remove it for the shipped table.")
    return 0


def measured(key: Key, isa: Isa) -> dict[int, Seconds]:
    """Returns, for each M, the seconds that each kernel takes for one weight of every shape, all shapes together."""
    found: dict[int, Seconds] = {}
    beaten: set[str] = set()
    for m in _ROWS:
        names = [name for name in SERVE[key] if choose.serves(name, key, m, isa) and name not in beaten]
        shapes = [_shortest(names, key, m, *shape) for shape in _SHAPES]
        found[m] = {name: sum(seconds[name] for seconds in shapes) for name in names}
        if m >= _MANY_ROWS:
            beaten |= _beaten(names, found[m])
    return found


def _beaten(names: Sequence[str], seconds: Seconds) -> set[str]:
    """Returns the kernels that need not be measured for larger M: one that takes over from them is far faster.

    Without instructions for half precision, torch takes a second for what others multiply in milliseconds.
    """
    return {
        name
        for place, name in enumerate(names)
        if any(seconds[later] * _FAR_FASTER < seconds[name] for later in names[place + 1 :])
    }


def table(names: Sequence[str], seconds: dict[int, Seconds]) -> list[tuple[int | None, str]]:
    """Returns a row of the table of `choose`: the kernel up to each number of rows; None stands for all larger ones.

    Each kernel takes over from the previous one once, at the M with the least sum of times, as multiples of the
    shortest: two kernels that are equal within noise do not alternate.

    Args:
        names: in the order in which they take over. A kernel that does not serve an M has no time there.
    """
    rows = list(seconds)

    def kernels(bounds: Sequence[int]) -> list[str]:
        """Returns the kernel of each M, if they take over at these indices."""
        edges = [0, *bounds, len(rows)]
        return [name for name, begin, end in zip(names, edges, edges[1:], strict=False) for _ in rows[begin:end]]

    def cost(bounds: Sequence[int]) -> float:
        chosen = zip(rows, kernels(bounds), strict=True)
        return sum(seconds[m].get(name, math.inf) / min(seconds[m].values()) for m, name in chosen)

    best = kernels(min(itertools.combinations_with_replacement(range(len(rows) + 1), len(names) - 1), key=cost))
    row = [(m, name) for m, name, after in zip(rows, best, [*best[1:], ""], strict=True) if name != after]
    return [*row[:-1], (None, row[-1][1])]


def write(path: Path, machine: str, profile: dict[str, Any]) -> None:
    """Adds the profile to those of other machines; writes the file as a whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        known = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "w") as new:
            json.dump({**(known if isinstance(known, dict) else {}), machine: profile}, new, indent=1)
        os.chmod(name, 0o644)  # others may share the folder
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _name(key: Key) -> str:
    return f"{str(key[0]).removeprefix('torch.')} {key[1].value}"


def _words(most: int | None, name: str) -> str:
    return f"{name} beyond" if most is None else f"{name} up to {most} rows"


@torch.no_grad()
def _shortest(names: Sequence[str], key: Key, m: int, n: int, k: int) -> Seconds:
    """Returns the least times of some interleaved rounds: a disturbed machine slows all kernels."""
    dtype, layout = key
    # Random values: the time of a product may depend on them.
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, k, generator=generator, dtype=torch.float32).to(dtype) for rows in (m, n))
    if layout is Layout.COLUMNS:
        weight = weight.t().contiguous().t()
    weights = [weight.clone(memory_format=torch.preserve_format) for _ in range(max(_BYTES // weight.nbytes, 1))]
    products = {name: _product(name, x, weights) for name in names}
    rounds = [{name: _seconds(*product) for name, product in products.items()} for _ in range(_ROUNDS)]
    return {name: min(times[name] for times in rounds) for name in names}


def _product(name: str, x: Tensor, weights: list[Tensor]) -> tuple[Callable[[Any], object], Sequence[Any]]:
    if name == TORCH:
        return functools.partial(F.linear, x), weights
    if name == PANELS:
        packed = [copies.panels(weight.bfloat16()) for weight in weights]
        return functools.partial(choose.linear, x), packed
    return lambda weight: KERNELS[name].multiply(x, weight, None), weights


def _seconds(product: Callable[[Any], object], weights: Sequence[Any]) -> float:
    """Returns seconds per weight; first evicts all weights from the processor's caches, if possible."""
    for weight in weights:
        torch.ops.fastgen.evict.default(getattr(weight, "qweight", weight))
    start = time.perf_counter()
    for weight in weights:
        product(weight)
    return (time.perf_counter() - start) / len(weights)
