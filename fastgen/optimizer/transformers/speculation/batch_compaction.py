"""Batch compaction: finished rows leave the batch, and the others continue in a step for fewer inputs.

The smaller step takes less time per iteration, but has to be recorded first. It is recorded once it would have saved as
many seconds as recording the larger one took. So no call has lost more than twice the unavoidable time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastgen import settings
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.any_batch import reads_sources
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.pays import STEPS_OF_A_CALL, Ledger
from fastgen.optimizer.transformers.captured.prefilled_call import BATCHES
from fastgen.optimizer.transformers.speculation.drafting import Drafting, lengths_of


def smaller_key(drafting: Drafting) -> Key | None:
    """Returns the key of the smallest step for all unfinished inputs; None if it has more than half of this one's.

    The larger steps stay until the call ends, so all together have less than twice the memory of the first one.
    """
    key = drafting.key
    if key.batch == 1:
        return None
    count = int(drafting.search.unfinished.any(dim=1).sum())
    size = next((size for size in BATCHES if size >= count), key.batch)
    if 2 * size > key.batch or reads_sources(key):
        return None
    smaller = replace(key, batch=size)
    return replace(smaller, draft=key.draft._replace(is_ragged=key.draft.is_ragged and smaller.rows > 1))


def remaining(drafting: Drafting, size: int) -> Tensor:
    """Returns [size], int64: the unfinished inputs, and as many finished ones as fill the batch, in order."""
    has_finished = ~drafting.search.unfinished.any(dim=1)
    return has_finished.byte().argsort(stable=True)[:size].sort().values


def pays(model: Any, drafting: Drafting, key: Key, length: int, tokens: int) -> bool:
    """Whether the unfinished inputs should move to a step of this smaller key now. To be called in each iteration.

    Args:
        length: tokens drafted in the last iteration.
        tokens: the most that the rows may still get.
    """
    if settings.current().captured_step == "always":
        return not graph_cache.is_refused(model, key)
    step = graph_cache.kept(model, key)
    kept = None if step is None else step.drafting
    # Iterations of the smaller step draft about as many tokens per row.
    place = min(sum(each < length for each in drafting.lengths), len(drafting.lengths) - 1)
    length, smaller = drafting.lengths[place], lengths_of(key)[place]
    now = drafting.costs.iterations().get(length)
    if now is None or drafting.costs.seconds(length + 1) is None or graph_cache.is_refused(model, key):
        return False
    if kept is not None and not kept.costs.allows(smaller):
        kept = None  # calls with so few rows have not prepared it yet
    if kept is not None and kept.costs.knows(has_model=False):
        saved = now - kept.costs.iterations()[smaller]
    else:
        saved = now - drafting.costs.estimate(key.rows, smaller)
    if kept is not None:
        iterations = min(tokens, STEPS_OF_A_CALL) * drafting.key.rows / drafting.tokens_of(length)
        return saved * iterations > kept.seconds_of_move
    ledger = Ledger.of(model)
    if ledger.lose(key, max(saved, 0.0)) < drafting.seconds_of_first_runs:
        return False
    ledger.is_repaid(key)  # if the step is dropped, it has to pay again
    return True
