"""Beginnings that prompts share: what is kept of them, and for how long."""

from __future__ import annotations

import torch

from fastgen.decoding.kv import Pair
from fastgen.decoding.prompt_caches import BLOCK, PrefixCache

LAYERS, HEADS, DIM = 2, 3, 4
OF_BLOCK = LAYERS * 2 * HEADS * BLOCK * DIM * 4


def kv_of(tokens: list[int]) -> list[Pair]:
    """K and V that say which token they are of."""
    part = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(1, HEADS, -1, DIM)
    return [(part + layer, part - layer) for layer in range(LAYERS)]


def test_a_prompt_finds_the_blocks_that_it_begins_with() -> None:
    cache, tokens = PrefixCache(10 * OF_BLOCK), list(range(3 * BLOCK + 5))
    cache.put(tokens, kv_of(tokens))
    other = tokens[: 2 * BLOCK] + [7] * BLOCK
    assert (cache.match(tokens), cache.match(other), cache.match([9, *tokens])) == (3 * BLOCK, 2 * BLOCK, 0)
    assert cache.nbytes == 3 * OF_BLOCK
    for found, wanted in zip(cache.take(other), kv_of(other[: 2 * BLOCK]), strict=True):
        assert all(map(torch.equal, found, wanted))


def test_what_is_not_used_for_longest_goes_first() -> None:
    cache, prompts = PrefixCache(4 * OF_BLOCK), [[number] * (2 * BLOCK + 1) for number in range(3)]
    for tokens in prompts[:2]:
        cache.put(tokens, kv_of(tokens))
    cache.take(prompts[0])
    cache.put(prompts[2], kv_of(prompts[2]))
    assert [cache.match(tokens) for tokens in prompts] == [2 * BLOCK, 0, 2 * BLOCK]


def test_no_more_is_copied_than_is_kept() -> None:
    """A prompt that is longer than there is room for: its beginning is kept, and at no time more than that."""
    cache, tokens = _Watched(3 * OF_BLOCK), list(range(8 * BLOCK))
    cache.put(tokens, kv_of(tokens))
    assert cache.match([*tokens, 0]) == 3 * BLOCK and cache.largest == 3 * OF_BLOCK


class _Watched(PrefixCache):
    largest = 0

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "nbytes":
            self.largest = max(self.largest, self.nbytes)
