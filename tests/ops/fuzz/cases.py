"""What all generators of arguments that fit share. What comes out is tested in tests/ops, an operator a file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Check = Callable[[list[Any], Any], None]


class Case(NamedTuple):
    """Arguments in the order of the schema; maybe a check of what is left of the state of the process."""

    args: list[Any]
    check: Check = lambda args, result: None
    refused: bool = False  # this processor cannot


Make = Callable[[random.Random], Case]
CASES: dict[str, Make] = {}


def of(*names: str) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Registers a generator for operators ("name" or "name.overload"); of several, it is given which one."""

    def register(make: Callable[..., Case]) -> Callable[..., Case]:
        for name in names:
            CASES[name] = make if len(names) == 1 else lambda rng, name=name: make(rng, name)
        return make

    return register


def size(rng: random.Random, most: int = 40, least: int = 1) -> int:
    """Small ones more often; now and then what fills blocks of kernels."""
    return rng.choice((least, rng.randint(least, 8), rng.randint(least, most), rng.randint(least, most)))


def rows_apart(x: Tensor, rng: random.Random) -> Tensor:
    """The same matrix, maybe with gaps between its rows."""
    gap = rng.choice((0, 0, 1, 5))
    return torch.nn.functional.pad(x, (0, gap))[..., : x.shape[-1]] if gap else x


def maybe(rng: random.Random, value: Any, chance: float = 0.5) -> Any:
    return value if rng.random() < chance else None


def untouched(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a result: numbers that nobody wants."""
    return torch.full(shape, 113, dtype=dtype) if dtype is not torch.bool else torch.zeros(shape, dtype=dtype)
