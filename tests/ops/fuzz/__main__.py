"""Draws arguments for operators, most of which do not fit, and looks at what the operators do with them.

    python -m tests.ops.fuzz --seed 7 --draws 1000          # some draws, operators in turn
    python -m tests.ops.fuzz --seed 7 --only 123            # one of them again

All tensors lie between forbidden pages (guarded.py), those that operators make too. An operator must take arguments
that fit. Whatever else it is given, it must not end the process, nor write to what is only read. What it refuses, it
must leave as it was. What comes out, the operators' own tests compare. Prints counts for each operator as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import mmap
import random
import resource
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen.ops
from tests.ops.fuzz import attention_cases, cases, linear_cases, other_cases, search_cases  # noqa: F401
from tests.ops.fuzz.guarded import Memory, Results
from tests.ops.fuzz.mutations import drawn, lacks, mutated, placed
from tests.ops.instructions import instruction_set

_SETS = (None, None, None, "avx2", "avx-vnni", "default")
_FITTING = 0.45  # of the draws
# With other vectors than the widest these are refused.
_OF_WIDEST = ("pack_bf16", "bf16_gemm", "bf16x3_gemm_out")
# What operators may ask for beyond what the process has: more must be an error.
_SPARE_BYTES = 3 * 2**30
# What is written may lie in what is read: all of it is one piece of memory, or a number is read before it is written.
MAY_SHARE = ("elementwise", "rms_norm_out", "evict")
_CASES = cases.CASES


# Operators without a kernel: Python code that calls torch's operators, which check what they are given as ever.
_OF_TORCH = {"fastgen::separate_linear", "fastgen::stored_topk"}


def operators() -> list[str]:
    """The operators that have kernels in this process."""
    for module in (*(module for module, _ in fastgen.ops.OPERATORS.values()), "runtime"):
        __import__(f"fastgen.ops.{module}")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastgen::")}
    keys = "CPU", "CompositeExplicitAutograd"
    return [name.removeprefix("fastgen::") for name in sorted(names - _OF_TORCH) if any(has(name, key) for key in keys)]


def overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.fastgen, base), overload or "default")


class Fuzzer:
    """All draws of a seed. `counts` are those of each operator: accepted where they fit, taken, refused."""

    def __init__(self, seed: int, only: Sequence[str] = ()) -> None:
        known = operators()
        self.seed, self.names = seed, list(only) or known
        self.counts = {name: {"accepted": 0, "taken": 0, "refused": 0} for name in self.names}
        self._memory = Memory()
        self._results = Results(self._memory)

    def draw(self, number: int) -> None:
        """Raises AssertionError where an operator has done what it must not."""
        rng = random.Random(f"{self.seed} {number}")
        torch.manual_seed(rng.randrange(2**31))
        self._memory.random = rng
        name = self.names[number % len(self.names)]
        with instruction_set(rng.choice(_SETS) if name not in _OF_WIDEST or rng.random() < 0.1 else None):
            try:
                self._draw(name, rng)
            finally:
                self._memory.clear()
                _put_back()

    def _draw(self, name: str, rng: random.Random) -> None:
        operator = overload(name)
        case = _CASES[name](rng)
        if rng.random() < _FITTING:
            self._fitting(name, operator, case, rng)
            return
        types = [str(each.type) for each in operator._schema.arguments]
        args = drawn(types, case.args, rng) if rng.random() < 0.1 else mutated(types, case.args, rng)
        self._changed(name, operator, placed(args, self._memory))

    def _fitting(self, name: str, operator: Any, case: cases.Case, rng: random.Random) -> None:
        args = placed(case.args, self._memory)
        self._memory.remember()
        try:
            result = self._called(name, operator, args, rng.random() < 0.2)
        except RuntimeError:
            if not case.refused:
                raise AssertionError("what fits is refused") from None
            assert not self._memory.has_changed(), "what is refused has been written to"
            self.counts[name]["refused"] += 1
            return
        assert not case.refused, "what this processor cannot do is done"
        assert self._memory.is_intact(), "written beside a tensor"
        case.check(args, result)
        self.counts[name]["accepted"] += 1

    def _changed(self, name: str, operator: Any, args: list[Any]) -> None:
        self._memory.remember()
        before = [_copies(arg) for arg in args]
        try:
            self._called(name, operator, args, False)
        except Exception as error:  # any: that there is one is what is wanted
            assert not isinstance(error, SystemError), error
            assert not self._memory.has_changed(), f"what is refused has been written to: {error}"
            self.counts[name]["refused"] += 1
            return
        assert self._memory.is_intact(), "written beside a tensor"
        self._check_taken(name, operator, args, before)
        self.counts[name]["taken"] += 1

    def _called(self, name: str, operator: Any, args: list[Any], in_plan: bool) -> Any:
        from fastgen.ops.runtime import OPERATORS

        schema = operator._schema.arguments
        plain = [arg for arg, each in zip(args, schema, strict=True) if not each.kwarg_only]
        named = {each.name: arg for arg, each in zip(args, schema, strict=True) if each.kwarg_only}
        with self._results.guarding():
            if not in_plan or operator.name() not in OPERATORS:
                return operator(*plain, **named)
            torch.ops.fastgen.open_plan()
            try:
                result = operator(*plain, **named)
            finally:
                plan = torch.ops.fastgen.close_plan(1)
            assert plan >= 0
            try:
                torch.ops.fastgen.run_plan(plan)
            finally:
                torch.ops.fastgen.drop_plan(plan)
            return result

    def _check_taken(self, name: str, operator: Any, args: list[Any], before: list[Any]) -> None:
        """Of arguments that were not refused: what must hold whatever they are."""
        flat = [x for arg in args for x in _listed(arg) if isinstance(x, Tensor)]
        if any(x.is_meta for x in flat) and torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta"):
            return  # that has been asked for the shape of the result alone
        writes = [each.is_write for each in operator._schema.arguments]
        tensors = [(x, old, write) for arg, olds, write in zip(args, before, writes, strict=True)
                   for x, old in zip(_listed(arg), olds, strict=True) if isinstance(x, Tensor)]  # fmt: skip
        written = {x.untyped_storage().data_ptr() for x, old, write in tensors if write and old is not None}
        for x, old, write in tensors:
            assert lacks(x) == 0, "a storage that is too small is taken"
            assert x.device.type == "cpu" or not x.numel(), "a tensor that is not on the CPU is taken"
            if old is not None and not write and name not in MAY_SHARE:
                assert _unchanged(x, old, written), "what is only read has been written to"
        if name in MAY_SHARE:
            return
        for place, (x, _, write) in enumerate(tensors):
            for other, _, _ in (tensors[:place] + tensors[place + 1 :]) if write else []:
                assert not _shares(x, other), "what is written shares memory with what is read"


def _listed(arg: Any) -> list[Any]:
    return arg if isinstance(arg, list) else [arg]


def _flat(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def _unchanged(x: Tensor, old: Tensor, written: set[int]) -> bool:
    """Whether a tensor is as it was: all bytes of its storage, or its own where another is written between them."""
    if x.untyped_storage().data_ptr() not in written:
        return torch.equal(old, _flat(x))
    begin = x.untyped_storage().data_ptr()
    mine = torch.tensor(sorted(byte - begin for byte in _bytes_of(x)), dtype=torch.int64)
    return torch.equal(old[mine], _flat(x)[mine])


def _copies(arg: Any) -> list[Tensor | None]:
    """What is in the storages of tensors, of those that have one."""
    is_here = [isinstance(x, Tensor) and x.layout is torch.strided and x.device.type == "cpu" for x in _listed(arg)]
    return [_flat(x.detach()).clone() if here else None for x, here in zip(_listed(arg), is_here, strict=True)]


def _shares(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have a byte in common, of those that are small."""
    if not all(each.layout is torch.strided and each.numel() and each.device.type == "cpu" for each in (x, other)):
        return False
    if max(x.numel(), other.numel()) > 2**14:
        return False
    return not _bytes_of(x).isdisjoint(_bytes_of(other))


def _bytes_of(x: Tensor) -> set[int]:
    places = torch.zeros(x.shape, dtype=torch.int64)
    for dim, stride in enumerate(x.stride()):
        shape = [1] * x.dim()
        shape[dim] = x.shape[dim]
        places += torch.arange(x.shape[dim]).view(shape) * stride
    begin, itemsize = x.data_ptr(), x.element_size()
    return {begin + place * itemsize + byte for place in places.flatten().tolist() for byte in range(itemsize)}


def _put_back() -> None:
    """No command list is open, and nobody has the thread pool."""
    with contextlib.suppress(RuntimeError):  # there was none
        torch.ops.fastgen.close_plan(-1)
    torch.ops.fastgen.give_team_back()


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--operator", action="append", default=[], help="this one; may be given several times")
    parser.add_argument("--only", type=int, help="the number of a draw, from 0 on")
    parser.add_argument("--progress", type=Path, help="a file of eight bytes: the number of the draw is written there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parsed(arguments)
    faulthandler.enable()
    fuzzer = Fuzzer(given.seed, given.operator)
    progress = mmap.mmap(-1, 8)
    if given.progress is not None:
        with given.progress.open("r+b") as file:
            progress = mmap.mmap(file.fileno(), 8)
    _limit_memory()
    wrong = 0
    for number in range(given.draws) if given.only is None else [given.only]:
        progress[:] = struct.pack("q", number)
        try:
            fuzzer.draw(number)
        except Exception:
            wrong += 1
            name = fuzzer.names[number % len(fuzzer.names)]
            options = "".join(f" --operator {each}" for each in given.operator)
            print(f"{name}: python -m tests.ops.fuzz --seed {given.seed} --only {number}{options}", file=sys.stderr)
            traceback.print_exc(limit=-4)
            if wrong == 10:
                break
    print(json.dumps(fuzzer.counts))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
