"""The bookkeeping of a step of a search, in place: what `take` does in `fastgen.decoding.captured.search`, in one call.

There it is spelled out in torch, in some sixty operators for beam search, whose numbers are so few that starting the
operators is all that takes time. That is the reference, and what other devices use; the names of the arguments are those
of the buffers there. Here are the same rules for the CPU, with the same results number by number: equal scores come in
the order of torch.topk.

`take_rows_(tokens, stops, ...)`: tokens [rows], int64, and stops [rows], bool, or None.
`take_beams_(candidate_scores, candidate_beams, candidate_tokens, stops, ...)`: [batch, candidates] each, as
`best_continuations` gives them; stops [batch * candidates], bool, or None; early_stopping: a number of `EARLY_STOPPING`.

Both raise RuntimeError where shapes, types or beams do not fit. Nothing has been written then.
"""

from __future__ import annotations

import functools
from functools import partial

from torch import Tensor

from fastgen.ops import _library

EARLY_STOPPING = {False: 0, True: 1, "never": 2}
"""`early_stopping` of `generate`, as the operator gets it."""


def available(like: Tensor) -> bool:
    """Whether there are kernels for the device of this tensor."""
    return like.device.type == "cpu" and _has_kernels()


@functools.cache
def _has_kernels() -> bool:
    return _library.has_kernel("fastgen::take_rows_") and _library.has_kernel("fastgen::take_beams_")


backend = partial(_library.backend, "fastgen::take_beams_")
_library.define(
    "take_rows_(Tensor tokens, Tensor? stops, Tensor eos, Tensor limit, Tensor is_spoilt,"
    " Tensor(a!) running_sequences, Tensor(b!) next_tokens, Tensor(c!) length, Tensor(d!) taken, Tensor(e!) unfinished,"
    " Tensor(f!) done) -> ()"
)
_library.define(
    "take_beams_(Tensor candidate_scores, Tensor candidate_beams, Tensor candidate_tokens, Tensor? stops, Tensor eos,"
    " Tensor penalties, Tensor favours_length, Tensor is_real, Tensor limit, Tensor is_spoilt,"
    " Tensor(a!) running_sequences, Tensor(b!) running_indices, Tensor(c!) running_scores, Tensor(d!) sequences,"
    " Tensor(e!) indices, Tensor(f!) scores, Tensor(g!) finished, Tensor(h!) improvable, Tensor(i!) next_tokens,"
    " Tensor(j!) parents, Tensor(k!) length, Tensor(l!) taken, Tensor(m!) unfinished, Tensor(n!) done,"
    " int prompt_capacity, int early_stopping) -> ()"
)
