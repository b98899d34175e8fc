"""The bookkeeping of a search step, in place: takes the chosen tokens, and advances the step's state (`advance_`).

`take_rows_`, `take_beams_` and `commit_` do what the searches of `fastgen.decoding.captured` and of
`fastgen.decoding.speculation` do; `advance_` does what `StepState.advance` in `fastgen.decoding.kv.rows` does, and
updates masks and positions. Those spell it out in torch: some seventy operators for beam search, on so few numbers that
launching the operators takes all of the time. They are the reference, and run on other devices; most arguments have the
names of the buffers there. This module implements the same rules for the CPU, with identical results: equal scores come
in the order of torch.topk.

`take_rows_(tokens, stops, ...)`: tokens [rows], int64, and stops [rows], bool, or None. `take_beams_(candidate_scores,
candidate_beams, candidate_tokens, stops, ...)`: [batch, candidates] each, as `best_continuations` returns them; stops
[batch * candidates], bool, or None; early_stopping: one of `EARLY_STOPPING`. `commit_(chosen, counts, accepted, near,
near_ties, ...)`: chosen [rows, width], int64; the drafted tokens are in the running sequences, after their ends; counts
[rows], int64: how many of these tokens count. Sets `accepted`, [rows], int64, as `accept_greedy` of
`fastgen.decoding.speculation.speculative_search`. If counts is None, `accepted` tells how many of `chosen` are taken
besides the last one. Adds to `near_ties`, one int64, the number of taken tokens for which near, [rows, width], bool, is
set. `advance_(parents, taken, stored, numbers, ancestry, seen, positions, masks, width)`: `numbers` is the
`position_table` of `StepState`. `seen`, one int64, becomes the cache length of the longest row, including `stored`, the
length of the prefix, one int64. Positions, int64 [rows, 1], increase by `taken`, int64 [rows]. Masks, [rows, stored +
capacity], int64, int32, float32 or bool, get ones for the next `width` positions.

All raise RuntimeError if shapes, types or beams do not fit. Nothing has been written then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fastgen.ops import _library

EARLY_STOPPING = {False: 0, True: 1, "never": 2}
"""`early_stopping` of `generate`, as the operator takes it."""

_MASKS = (torch.int64, torch.int32, torch.float32, torch.bool)
_OPERATORS = ("take_rows_", "commit_", "take_beams_", "advance_")


def available(like: Tensor) -> bool:
    """Whether there are kernels for the device of this tensor."""
    return like.device.type == "cpu" and _has_kernels()


def serves(positions: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    """Whether `advance_` can write positions and masks of these types."""
    return all(each.dtype is torch.int64 for each in positions) and all(mask.dtype in _MASKS for mask in masks)


@functools.cache
def _has_kernels() -> bool:
    return all(_library.has_kernel(f"fastgen::{name}") for name in _OPERATORS)


backend = partial(_library.backend, "fastgen::take_beams_")
_library.define(
    "take_rows_(Tensor tokens, Tensor? stops, Tensor eos, Tensor limit, Tensor has_nan,"
    " Tensor(a!) running_sequences, Tensor(b!) next_tokens, Tensor(c!) length, Tensor(d!) taken, Tensor(e!) unfinished,"
    " Tensor(f!) done) -> ()"
)
_library.define(
    "commit_(Tensor chosen, Tensor? counts, Tensor(a!) accepted, Tensor? near, Tensor(b!) near_ties, Tensor eos,"
    " Tensor fill, Tensor limit, Tensor has_nan, Tensor(c!) running_sequences, Tensor(d!) next_tokens,"
    " Tensor(e!) length, Tensor(f!) taken, Tensor(g!) unfinished, Tensor(h!) done, bool together) -> ()"
)
_library.define(
    "take_beams_(Tensor candidate_scores, Tensor candidate_beams, Tensor candidate_tokens, Tensor? stops, Tensor eos,"
    " Tensor penalties, Tensor favours_length, Tensor is_real, Tensor limit, Tensor has_nan,"
    " Tensor(a!) running_sequences, Tensor(b!) running_indices, Tensor(c!) running_scores, Tensor(d!) sequences,"
    " Tensor(e!) indices, Tensor(f!) scores, Tensor(g!) finished, Tensor(h!) improvable, Tensor(i!) next_tokens,"
    " Tensor(j!) parents, Tensor(k!) length, Tensor(l!) taken, Tensor(m!) unfinished, Tensor(n!) done,"
    " Tensor prompt, int early_stopping) -> ()"
)
_library.define(
    "advance_(Tensor? parents, Tensor taken, Tensor stored, Tensor(a!) numbers, Tensor(b!)? ancestry, Tensor(c!) seen,"
    " Tensor(d!)[] positions, Tensor(e!)[] masks, int width=1) -> ()"
)
