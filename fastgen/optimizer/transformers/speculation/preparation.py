"""What drafts need is made little by little, in calls that draft nothing yet.

Recording a part of a step takes as long as some twenty steps, and a step with drafts has five parts; the weights are
copied, too. A call that did it all would take twice as long as a plain one. So one thing is made in a call at the most,
and all of them together take a tenth of the time of the tokens that calls have asked for (64 of each at the most,
where it may end earlier).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastgen.decoding.speculation.costs import DRAFT
from fastgen.decoding.speculation.draft_length import AT_FIRST
from fastgen.optimizer.transformers.captured.pays import Budget
from fastgen.optimizer.transformers.speculation.drafting import Drafting
from fastgen.optimizer.transformers.speculation.drafts import Draft


def make_next(
    budget: Budget, drafting: Drafting, model: Any, draft: Draft, plain: float, begin: Callable[[], None]
) -> bool:
    """Makes one more thing, if there is one and time for it; says whether there is enough for calls to draft.

    Args:
        plain: seconds of a plain step.
        begin: begins a call in the step, of which nothing is kept.
    """
    # Parts by the positions that they verify. Calls draft once they have the first ones.
    lengths = drafting.lengths
    needed, more = (lengths[AT_FIRST] + 1, DRAFT, 1), (lengths[-1] + 1, lengths[1] + 1)
    missing = [part for part in (*needed, *more) if drafting.costs.seconds(part) is None]
    seconds = budget.for_next(plain)
    if missing and seconds is not None:
        start = time.perf_counter()
        is_recorded = missing[0] != DRAFT or draft.make(0.0)
        if is_recorded:
            begin()
            _measure(drafting, model, draft, missing[0])
        else:
            draft.make(seconds)
        budget.spend(time.perf_counter() - start, is_typical=is_recorded)
    return all(drafting.costs.seconds(part) is not None for part in needed)


def _measure(drafting: Drafting, model: Any, draft: Draft, part: int) -> None:
    if part == DRAFT:
        drafting.measure(part, lambda: draft.propose(drafting, model, 1))
    else:
        drafting.measure(part, lambda: drafting.verify(model, part - 1))
