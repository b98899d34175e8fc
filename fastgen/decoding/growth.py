"""How memory that is filled position by position grows."""

from __future__ import annotations

_MIN_GROWTH = 64  # positions


def capacity(needed: int, present: int) -> int:
    """Positions to allocate where `needed` do not fit into `present`: a quarter more, so that few are copied often."""
    return max(needed, present + max(present // 4, _MIN_GROWTH))
