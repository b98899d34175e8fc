"""What a search does with the scores of a step: best candidates, the best token, top-p; then its bookkeeping, in place.

`best_candidates` and `best_continuations`: log-softmax, addition and top-k in one pass. In torch, the first two each
read and write everything, and the top-k copies everything once more, with its indices. The result is torch's: of equal
scores the same, in the same order, which depends on the algorithm. That order is compared with torch's once, on scores
with many ties. Only the last digits of a log-softmax may differ: its denominator is summed in another order.

`top_two`: the best token of each row, and whether another one is about as good, in one pass. In torch, comparing the
two best takes six passes besides that of the argmax. Verifying drafted tokens does this for each of them.

`sort_rows` is a radix sort: torch takes 4 to 12 ms for the 49,152 scores of a row, as long as a decode step of a small
model. It may order equal numbers differently: it promises no order, and has different ones on different processors.

`top_p_` (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1) sorts only the rows that
need it. The same tokens are dropped as by the library: if only some of several equal scores are dropped, torch's order
decides, so torch sorts such rows once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library, gpu

# ---- best candidates

# With fewer scores, overhead outweighs the pass over the scores.
MIN_SCORES = 2**16
# With more candidates, the pass over the scores no longer dominates.
_MAX_COUNT = 256
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Candidates(NamedTuple):
    """The best continuations of every input, best first: each [batch, count]."""

    scores: Tensor  # accumulated log-probabilities, float32
    beams: Tensor  # the beam of the input that is continued, int64
    tokens: Tensor  # the token that continues it, int64


def best_candidates(scores: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` best of `scores + running`, over the beams of each input.

    Args:
        scores: [inputs * beams, vocabulary], of a floating type.
        running: [inputs, beams], of the same type: added to the scores of each beam.
        count: from 1 to beams * vocabulary.

    Returns:
        What `torch.topk` returns for the sum: values, and indices in [inputs, beams * vocabulary], both [inputs,
        count].

    Raises:
        RuntimeError: shapes, types or `count` are not as above.
    """
    if not _has_pass(scores, running, count) or scores.dtype is not running.dtype:
        return _candidates_reference(scores, running, count)
    values, beams, tokens = by_beam(scores, running, count)
    return values, tokens.add_(beams, alpha=scores.shape[1])


def _has_pass(scores: Tensor, running: Tensor, count: int) -> bool:
    """Whether the kernel accepts these arguments."""
    return (
        count <= _MAX_COUNT
        and scores.dtype in _TYPES
        and running.dtype is torch.float32
        and scores.device.type == running.device.type == "cpu"
        and not (torch.is_grad_enabled() and (scores.requires_grad or running.requires_grad))
        and _orders_as_torch()
    )


def by_beam(scores: Tensor, running: Tensor, count: int, *, normalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """As `best_candidates`, if the kernel takes these. Returns values, beams and tokens, [inputs, count].

    Args:
        scores: [inputs * beams, vocabulary], float32, bfloat16 or float16; computation is in float32.
        running: [inputs, beams], float32.
        normalise: the scores are logits; take their log-softmax.

    Returns:
        float32, int64 and int64.
    """
    values = running.new_empty(len(running), count)
    beams, tokens = (torch.empty_like(values, dtype=torch.int64) for _ in range(2))
    torch.ops.fastgen.best_candidates_out(values, beams, tokens, scores.contiguous(), running.contiguous(), normalise)
    return values, beams, tokens


def best_continuations(scores: Tensor, running: Tensor, count: int, *, normalise: bool = True) -> Candidates:
    """Returns the `count` best continuations of each input over all its beams, on any device.

    Equal scores come in the order of torch.topk. On a GPU, where it promises none, the lower beam comes first, and
    within a beam the lower token; scores that differ before the softmax keep that order, even if they are equal after
    it.

    Args:
        scores: [rows, vocabulary], any floating type: logits, or, if processors have changed the log-probabilities,
            those, which must not be normalised.
        running: [batch, beams]: the accumulated scores of the beams; rows = batch * beams.
        count: from 1 to beams * vocabulary.
        normalise: take the log-softmax of `scores`.

    Raises:
        ValueError: shapes or `count` are not as above.
    """
    if scores.dim() != 2 or running.dim() != 2 or scores.shape[0] != running.numel():
        raise ValueError(f"best_continuations: scores {tuple(scores.shape)} for running scores {tuple(running.shape)}")
    beams, vocabulary = running.shape[1], scores.shape[1]
    if not 1 <= count <= beams * vocabulary:
        raise ValueError(f"best_continuations: {count} of {beams} x {vocabulary} candidates")
    if gpu.available(scores, running):
        from fastgen.ops.gpu import launches as on_gpu

        if on_gpu.serves_candidates(scores, running, count):
            return Candidates(*on_gpu.launch_best_candidates(scores, running, count, normalise))
    if _has_pass(scores, running, count):
        return Candidates(*by_beam(scores, running, count, normalise=normalise))
    return continuations_reference(scores, running, count, normalise=normalise)


def continuations_reference(scores: Tensor, running: Tensor, count: int, *, normalise: bool = True) -> Candidates:
    """`best_continuations` in plain torch, for any device and type, with the ties of torch.topk."""
    vocabulary = scores.shape[1]
    accurate = torch.promote_types(scores.dtype, torch.float32)
    values = torch.log_softmax(scores, dim=-1, dtype=accurate) if normalise else scores.to(accurate)
    values = values.view(*running.shape, vocabulary) + running.unsqueeze(2)
    best, indices = values.flatten(1).topk(count)
    return Candidates(best, indices // vocabulary, indices % vocabulary)


@functools.cache
def _orders_as_torch() -> bool:
    """Whether there is a kernel that orders equal scores as torch does, which differs for few and for many."""
    if not _library.has_kernel("fastgen::best_candidates_out"):
        return False
    for vocabulary, count in ((8000, 12), (60, 12)):
        scores = (torch.arange(3 * vocabulary, device="cpu") * 7919 % 101 % 8).to(torch.float32).view(3, -1)
        running = scores.new_zeros(1, 3)
        _, beams, tokens = by_beam(scores, running, count)
        if not torch.equal(beams * vocabulary + tokens, _candidates_reference(scores, running, count)[1]):
            return False
    return True


def _candidates_reference(scores: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if scores.dim() != 2 or running.dim() != 2 or scores.shape[0] != running.numel():
        raise RuntimeError("best_candidates: scores must be [inputs * beams, vocabulary] and running [inputs, beams]")
    values, indices = (scores.view(*running.shape, scores.shape[1]) + running.unsqueeze(2)).flatten(1).topk(count)
    return values, indices


_library.define(
    "best_candidates_out(Tensor(a!) values, Tensor(b!) beams, Tensor(c!) tokens, Tensor scores, Tensor running,"
    " bool normalise) -> ()"
)


# ---- the best token

# Scores of at least this magnitude represent masked tokens: libraries write -1e9 or the smallest number of the type.
MASKED = 1e8


def top_two(scores: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Returns the argmax of each row, and whether a second score is within `share` of the row's magnitude of the
    largest.

    Args:
        scores: [rows, vocabulary], of a floating type.
        share: fraction of the row's largest absolute score, not counting those of `MASKED` and more.

    Returns:
        [rows], int64, and [rows], bool. Of equal scores the first token wins. A NaN is the largest, and nothing is near
        it.
    """
    if not _has_two(scores):
        return top_two_reference(scores, share)
    tokens = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    is_near = torch.empty_like(tokens, dtype=torch.bool)
    torch.ops.fastgen.top_two_out(tokens, is_near, scores.contiguous(), MASKED, share)
    return tokens, is_near


def argmax_into(out: Tensor, scores: Tensor) -> Callable[[], object] | None:
    """Returns a function that writes the argmax of each row to `out`, [rows], int64; None without a kernel for these
    scores.

    In a recorded step it is faster than torch's argmax, which divides a row among torch's threads. Those would have to
    take the processors from the threads of the step.
    """
    if not (_has_two(scores) and scores.is_contiguous() and out.is_contiguous()):
        return None
    is_near = torch.empty(scores.shape[0], dtype=torch.bool, device=scores.device)
    return functools.partial(torch.ops.fastgen.top_two_out.default, out, is_near, scores, MASKED, 0.0)


def _has_two(scores: Tensor) -> bool:
    """Whether the kernel takes these scores."""
    is_matrix = scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.dim() == 2
    return is_matrix and scores.shape[1] > 0 and _library.has_kernel("fastgen::top_two_out")


def top_two_reference(scores: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """`top_two` in plain torch."""
    best = scores.amax(dim=-1, keepdim=True)
    sizes = scores.abs()
    bound = share * sizes.masked_fill(sizes >= MASKED, 0.0).amax(dim=-1, keepdim=True)
    return scores.argmax(dim=-1), (scores >= best - bound).sum(dim=-1) > 1


_library.define("top_two_out(Tensor(a!) tokens, Tensor(b!) is_near, Tensor scores, float masked, float share) -> ()")


# ---- sorting, and top-p

# For shorter rows, torch is faster than counting digits.
_LEAST_WIDTH = 2048


def sorts(x: Tensor) -> bool:
    """Whether the kernel sorts the last dimension of this tensor, faster than torch."""
    is_matrix = x.dim() == 2 and x.dtype is torch.float32 and x.device.type == "cpu" and x.shape[1] >= _LEAST_WIDTH
    return (
        is_matrix
        and not (x.requires_grad and torch.is_grad_enabled())
        and _library.has_kernel("fastgen::sort_rows_out")
    )


def sort_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts each row in ascending order. Equal numbers keep their order; NaN comes last.

    Args:
        x: [rows, width], of any type. The kernel takes float32 on the CPU (`sorts`).

    Returns:
        What `torch.sort(x, stable=True)` returns: values like `x`, and their columns, int64, both [rows, width].
    """
    if not sorts(x):
        values, columns = torch.sort(x, stable=True)
        return values, columns
    x = x.contiguous()
    values, columns = torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)
    torch.ops.fastgen.sort_rows_out(values, columns, x)
    return values, columns


_library.define("sort_rows_out(Tensor(a!) values, Tensor(b!) columns, Tensor x) -> ()")


# Exceeds every probability: the row does not change.
EVERYTHING = 2.0


def top_p_(scores: Tensor, share: Tensor, fill: float, least: int, *, orders_as_torch: bool = True) -> Tensor:
    """Fills the scores of the least probable tokens, which together have 1 - `share` of the probability.

    Args:
        scores: [rows, vocabulary], float32: changed in place.
        share: float64, one number, or [rows, 1]. Above 1, such as `EVERYTHING`, the row does not change.
        fill: the new score of the dropped tokens.
        least: at least this many tokens stay; 1 or more.
        orders_as_torch: of equal scores, drop the same ones as the library. 16-bit scores, many of which are equal,
            gain nothing by that, and half of the rows would be sorted again.

    Returns:
        `scores`.
    """
    torch.ops.fastgen.top_p_(scores, share, fill, least, orders_as_torch)
    return scores


def _top_p_(scores: Tensor, share: Tensor, fill: float, least: int, orders_as_torch: bool) -> None:
    _check_top_p(scores, share, least)
    share = share.reshape(-1, 1)
    if bool((share <= 1).all()):
        scores.masked_fill_(_goes(scores, share, least, orders_as_torch), fill)
        return
    rows = (share.expand(len(scores), 1) <= 1).view(-1).nonzero().view(-1)
    if len(rows):
        some = scores.index_select(0, rows)
        goes = _goes(some, share.expand(len(scores), 1)[rows], least, orders_as_torch)
        scores.index_copy_(0, rows, some.masked_fill_(goes, fill))


def _check_top_p(scores: Tensor, share: Tensor, least: int) -> None:
    """Raises RuntimeError, as a compiled operator does, before anything is written."""
    require = _library.checks("top_p_", RuntimeError)
    is_whole = all(each.is_cpu and _library.is_in_storage(each) for each in (scores, share))
    require(is_whole, "takes tensors on the CPU, in a storage that reaches as far as they do")
    require(not _library.share_memory(scores, share), "what is written shares memory with what is read")
    require(scores.dim() == 2 and scores.dtype is torch.float32, "scores must be [rows, vocabulary], float32")
    is_number = share.dtype is torch.float64 and share.shape in ((), (1,), (len(scores), 1))
    require(is_number, "share must be one number, or [rows, 1], float64")
    require(least > 0, "some token must stay")


def _goes(scores: Tensor, share: Tensor, least: int, orders_as_torch: bool) -> Tensor:
    """Returns the tokens to drop, [rows, vocabulary], bool."""
    values, columns = sort_rows(scores)
    goes = values.softmax(dim=-1).cumsum(dim=-1) <= (1 - share).to(scores.dtype)
    goes[:, -least:] = False
    if orders_as_torch and bool((goes[:, :-1] & ~goes[:, 1:] & (values[:, :-1] == values[:, 1:])).any()):
        columns = torch.sort(scores).indices
    return goes.scatter(1, columns, goes)


_library.define(
    "top_p_(Tensor(a!) scores, Tensor share, float fill, int least, bool orders_as_torch) -> ()",
    reference=_top_p_,
    fake=lambda *args: None,
)


# ---- bookkeeping: takes the chosen tokens, and advances the step's state (`advance_`)
#
# `take_rows_`, `take_beams_` and `commit_` do what the searches of `fastgen.decoding.captured` and of
# `fastgen.decoding.speculation` do; `advance_` does what `StepState.advance` in `fastgen.decoding.kv.rows` does, and
# updates masks and positions. Those spell it out in torch: some seventy operators for beam search, on so few numbers
# that launching the operators takes all of the time. They are the reference, and run on other devices; most arguments
# have the names of the buffers there. The operators implement the same rules for the CPU, with identical results: equal
# scores come in the order of torch.topk.
#
# `take_rows_(tokens, stops, ...)`: tokens [rows], int64, and stops [rows], bool, or None.
# `take_beams_(candidate_scores, candidate_beams, candidate_tokens, stops, ...)`: [batch, candidates] each, as
# `best_continuations` returns them; stops [batch * candidates], bool, or None; early_stopping: one of `EARLY_STOPPING`.
# `commit_(chosen, counts, accepted, near, near_ties, ...)`: chosen [rows, width], int64; the drafted tokens are in the
# running sequences, after their ends; counts [rows], int64: how many of these tokens count. Sets `accepted`, [rows],
# int64, as `accept_greedy` of `decoding.speculation.speculative_search` does. If counts is None, `accepted` tells how
# many of `chosen` are taken besides the last one. Adds to `near_ties`, one int64, the number of taken tokens for which
# near, [rows, width], bool, is set. `advance_(parents, taken, stored, numbers, ancestry, seen, positions, masks,
# width)`: `numbers` is the `position_table` of `StepState`. `seen`, one int64, becomes the cache length of the longest
# row, including `stored`, the length of the prefix, one int64. Positions, int64 [rows, 1], increase by `taken`, int64
# [rows]. Masks, [rows, stored + capacity], int64, int32, float32 or bool, get ones for the next `width` positions.
#
# All raise RuntimeError if shapes, types or beams do not fit. Nothing has been written then.

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
