"""How many positions the buffers of a captured step have room for."""

from __future__ import annotations

from typing import NamedTuple

from fastgen.ops.gpu import power_of_two

# On a GPU, lengths of prompts and sources are rounded up to a multiple, numbers of new tokens to a power of two.
_MULTIPLE = 128
_FIRST_NEW, _MAX_FIRST_NEW = 64, 256
# On a CPU, memory is only taken once it is written to, so sizes are the first number times a power of four. The second
# number is added, so that no other size in a model equals them (`fastgen.decoding.program_memory`).
_CACHED_ON_CPU, _NEW_ON_CPU, _SOURCE_ON_CPU = (128, 1), (64, 3), (128, 5)
# Room for new tokens begins with no more than this: a call may ask for any number of tokens and end early.
_MAX_FIRST_NEW_ON_CPU = 1024


class Sizes(NamedTuple):
    """Numbers of positions that there is room for. In a key, 0 stands for any number."""

    prompt: int  # of the sequences, before the new tokens
    cached: int  # K and V of self-attention that the prefill has stored
    new: int  # new tokens
    source: int  # K and V of cross-attention, or the encoder's input

    def fit(self, needed: Sizes) -> bool:
        """Whether there is room for `needed`."""
        return all(have >= want for have, want in zip(self, needed, strict=True))


def rounded(needed: Sizes, may_pad: bool, on_gpu: bool, at_once: bool = False) -> Sizes:
    """Returns sizes that calls of similar lengths share.

    Args:
        may_pad: the prompt may be preceded by padding; otherwise its length is exact.
        at_once: make room for all new tokens at once, not only for the first ones.
    """
    prompt, cached, new, source = needed
    if not at_once:
        new = min(new, _MAX_FIRST_NEW if on_gpu else _MAX_FIRST_NEW_ON_CPU)
    if on_gpu:
        new = max(power_of_two(new), _FIRST_NEW)
        if may_pad:
            prompt = cached = round_up(max(prompt, cached))
        return Sizes(prompt, cached, new, round_up(source))
    new = _power_of_four(new, *_NEW_ON_CPU)
    if may_pad:
        prompt = cached = _power_of_four(max(prompt, cached), *_CACHED_ON_CPU)
    return Sizes(prompt, cached, new, _power_of_four(source, *_SOURCE_ON_CPU) if source else 0)


def more_new(sizes: Sizes, on_gpu: bool) -> Sizes:
    """Returns these sizes with room for more new tokens."""
    return sizes._replace(new=2 * sizes.new if on_gpu else _power_of_four(sizes.new, *_NEW_ON_CPU))


def round_up(size: int, multiple: int = _MULTIPLE) -> int:
    return -(-size // multiple) * multiple


def _power_of_four(size: int, first: int, more: int) -> int:
    """Returns `first` times the least power of four that makes it at least `size`, plus `more`.

    For a size that this function has returned, the result is the next larger one.
    """
    found = first
    while found < size:
        found *= 4
    return found + more
