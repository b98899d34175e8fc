"""Attention, and the cache that it reads."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tests.ops.fuzz.cases import Case, maybe, of, size, untouched

_TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


def _embedded(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers, maybe with gaps between heads and positions."""
    if rng.random() < 0.6:
        return x
    shape = [each + rng.choice((0, 1, 3)) for each in x.shape]
    memory = torch.full(shape, 77, dtype=x.dtype)
    return memory[tuple(slice(0, each) for each in x.shape)].copy_(x)


def _random(rng: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    return _embedded(torch.randn(shape).to(dtype), rng)


class _Sizes:
    def __init__(self, rng: random.Random) -> None:
        self.batch, self.per_input = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
        self.kv_heads, self.group = rng.choice((1, 2)), rng.choice((1, 2, 3))
        self.dim, self.value_dim = rng.choice(((1, 1), (7, 5), (16, 16), (33, 40), (64, 64)))
        self.prefix = rng.choice((0, 1, size(rng, 40), size(rng, 200), 600))
        self.rows, self.heads = self.batch * self.per_input, self.kv_heads * self.group


def _kv(rng: random.Random, dtype: torch.dtype, sizes: _Sizes, rows: int, length: int) -> list[Tensor]:
    return [_random(rng, dtype, rows, sizes.kv_heads, length, dim) for dim in (sizes.dim, sizes.value_dim)]


def _ancestry(rng: random.Random, sizes: _Sizes, length: int) -> Tensor:
    own = torch.arange(sizes.rows).unsqueeze(1) // sizes.per_input * sizes.per_input
    return (own + torch.randint(sizes.per_input, (sizes.rows, length))).int()


@of("decode_attention_out")
def decode_attention_out(rng: random.Random) -> Case:
    sizes, dtype = _Sizes(rng), rng.choice(_TYPES)
    queries, causal = rng.choice((1, 1, 1, 2, 5)), rng.random() < 0.3
    capacity = rng.choice((1, size(rng, 80))) if causal or rng.random() < 0.7 else None
    options: dict[str, Any] = {"causal": causal}
    has_row_map = not causal and rng.random() < 0.2
    rows = rng.choice((1, 2, 3)) if has_row_map else sizes.rows
    query = _random(rng, dtype, rows, sizes.heads, queries, sizes.dim)
    prefix = _kv(rng, dtype, sizes, sizes.batch, sizes.prefix)
    if has_row_map:
        stored = sizes.batch if capacity is None else sizes.rows
        options["row_map"] = torch.randint(0, stored, (rows,))
    suffix: list[Tensor | None] = [None, None]
    if capacity is not None:
        suffix = list(_kv(rng, dtype, sizes, sizes.rows, capacity))
        one = rng.random() < 0.6 or has_row_map
        least = queries if causal and queries <= capacity else 0
        options["suffix_lengths"] = maybe(rng, torch.randint(least, capacity + 1, () if one else (rows,)))
        if not has_row_map and rng.random() < 0.6:
            options["ancestry"] = _ancestry(rng, sizes, capacity)
    if rng.random() < 0.3:
        options["starts"] = torch.randint(0, sizes.prefix + 1, (sizes.batch,)).int()
    if rng.random() < 0.3:
        options["ends"] = torch.randint(0, sizes.prefix + 1, (sizes.batch,)).int()
    if not causal and rng.random() < 0.3:
        options["window"] = rng.choice((0, 1, 17, 10**6))
    mask, scale = None, maybe(rng, 0.3)
    if rng.random() < 0.4:
        shape = [rng.choice((1, each)) for each in query.shape[:3]] + [sizes.prefix + (capacity or 0)]
        added = torch.randn(shape).to(rng.choice((dtype, torch.float32)))
        mask = torch.rand(shape) < 0.8 if rng.random() < 0.4 else added
    names = ("starts", "ends", "suffix_lengths", "ancestry", "window", "causal", "row_map")
    given = [
        untouched((*query.shape[:3], sizes.value_dim), dtype), query, *prefix, *suffix, mask, scale,
        *(options.get(name) for name in names),
    ]  # fmt: skip
    return Case(given)


@of("packed_attention", "packed_attention.out")
def packed_attention(rng: random.Random, name: str) -> Case:
    lengths = [rng.choice((0, 1, size(rng, 30), size(rng, 150))) for _ in range(rng.choice((0, 1, 2, 3)))]
    tokens, kv_heads, group = sum(lengths), rng.choice((1, 2)), rng.choice((1, 2))
    heads = kv_heads * group
    dim, value_dim = rng.choice(((1, 1), (7, 5), (16, 16), (33, 40), (64, 64)))
    query, keys, values = (
        _embedded(torch.randn(tokens, count, width), rng).transpose(0, 1)
        for count, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    )
    given = [query, keys, values, torch.tensor(lengths, dtype=torch.int64), 0.4]
    if name == "packed_attention.out":
        given.append(untouched((tokens, heads, value_dim)))
    return Case(given)


@of("kv_write")
def write(rng: random.Random) -> Case:
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8))
    rows, heads, capacity = size(rng, 6), rng.choice((1, 2, 3)), size(rng, 20)
    widths = rng.choice(((1, 1), (4, 7), (16, 16)))
    new = [_embedded(torch.randint(0, 100, (rows, heads, width)).to(dtype), rng) for width in widths]
    caches = [torch.randint(0, 100, (rows, heads, capacity, width)).to(dtype) for width in widths]
    if rng.random() < 0.3:  # one buffer
        both = torch.cat(caches, dim=3)
        caches = list(both.split(widths, dim=3))
    position = torch.randint(-2, capacity + 2, rng.choice(((), (1,), (rows,), (1, 1))))
    row_map = torch.randint(0, len(caches[0]), (rows,)) if rng.random() < 0.3 and len(caches[0]) else None
    return Case([*new, *caches, position, row_map])
