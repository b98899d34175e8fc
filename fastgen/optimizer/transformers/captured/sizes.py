"""For how many positions the buffers of a captured step have room."""

from __future__ import annotations

from typing import NamedTuple

from fastgen.ops.gpu import power_of_two

# On a GPU sizes are rounded up: of prompts and encoder outputs to a multiple, of what is generated to a power of two.
_MULTIPLE = 128
_FIRST_NEW, _MAX_FIRST_NEW = 64, 256
# On the CPU memory is taken as it is written to, so sizes are powers of four times the first of these. The second is
# added, so that no other size in a model is the same (`fastgen.decoding.kv.exchange`).
_CACHED_ON_CPU, _NEW_ON_CPU, _SOURCE_ON_CPU = (128, 1), (64, 3), (128, 5)
# What is generated begins with no more: a call may ask for any number of tokens and end early.
_MAX_FIRST_NEW_ON_CPU = 1024


class Sizes(NamedTuple):
    """For how many positions there is room. In a key, 0 stands for any number."""

    prompt: int  # of the sequences, in front of what is generated
    cached: int  # K and V of self-attention: of what the prefill has stored
    new: int  # of what is generated
    source: int  # K and V of cross-attention, or what the encoder has read

    def fit(self, needed: Sizes) -> bool:
        """Whether there is room for as much."""
        return all(have >= want for have, want in zip(self, needed, strict=True))


def rounded(needed: Sizes, may_pad: bool, on_gpu: bool, at_once: bool = False) -> Sizes:
    """Sizes for calls that need about as much.

    Args:
        may_pad: a prompt may be put behind padding; otherwise it has the length that it has.
        at_once: there is to be room for all that may be generated, and not for what is at first.
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
    """The same with room for more of what is generated."""
    return sizes._replace(new=2 * sizes.new if on_gpu else _power_of_four(sizes.new, *_NEW_ON_CPU))


def round_up(size: int, multiple: int = _MULTIPLE) -> int:
    return -(-size // multiple) * multiple


def _power_of_four(size: int, first: int, more: int) -> int:
    """At least `size`: `first` times a power of four, and `more`. Of one of these, the next."""
    found = first
    while found < size:
        found *= 4
    return found + more
