"""What inputs must have in common to be in one step with slots, and how different inputs come to share one.

A step may do more than some inputs ask for, if it changes nothing for them: a processor with a neutral number, a draw
that a greedy row ignores, a copy of scores that is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.choice import RECORDS
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.processors import Signed
from fastgen.optimizer.transformers.models import why_no_drafts
from fastgen.optimizer.transformers.row_adapters import ACTIVE, Adapters, in_order

# The most processors of one signature in a step that inputs of several kinds have brought. Each reads all scores in
# each step, and another number of them needs another recording. For a translator that forces a language token, there
# are as many as languages.
MOST_ALIKE = 4
# The most adapters that a step serves: it computes each adapter's product for all rows.
MOST_ADAPTERS = 8


class Kind(NamedTuple):
    """The properties that inputs must share to be in one step at the same time.

    Attributes:
        key: what is frozen in the step, except its batch.
        processors: what processors do to all inputs; None if the host runs each input's own.
        eos: tokens that end a sequence.
        fill: the token that pads sequences after their ends.
    """

    key: Key
    processors: tuple[Signed, ...] | None
    eos: tuple[int, ...]
    fill: int

    @classmethod
    def of(cls, decoding: EnteringDecoding) -> Kind:
        """Returns the kind of a call.

        Raises:
            CannotBeCaptured: inputs of such calls cannot enter slots.
        """
        key: Key = decoding.own_key
        if not graph.is_recorded(decoding.model.device):
            raise CannotBeCaptured("inputs come and go on the CPU only, so far")
        if key.source_in_front or key.width > 1:
            raise CannotBeCaptured("a model whose inputs cannot come and go")
        shared = decoding.shared_processors
        if shared is None:
            key = replace(key, processors=None)
        key = replace(decoding.of_any_sizes(key), batch=1, slots=True)
        return cls(key, shared, decoding.prompt.eos, decoding.fill())

    def may_draft(self, model: Any) -> bool:
        """Whether rows can verify drafts: an input has one sequence, and the host runs no code on it."""
        key = self.key
        is_one = key.per_input == 1 and key.early_stopping is None
        may_verify = is_one and not (key.forms or key.waits_for_host)
        return may_verify and why_no_drafts(model) is None and graph_cache.shares_kv(model) is not False

    def drafting(self) -> Kind:
        """Returns the kind of a step whose spare rows may verify drafts for inputs of this kind."""
        return self._replace(key=replace(self.key, maps_rows=True))

    def beside(self, adapters: Adapters) -> Kind:
        """Returns the kind of a step that also serves these adapters."""
        return self._replace(key=replace(self.key, adapters=in_order(*self.key.adapters, *adapters)))

    def with_inputs_of(self, other: Kind) -> Kind | None:
        """Returns the kind of a step that serves inputs of both kinds; None if there is none."""
        if (self.processors is None) is not (other.processors is None):
            return None
        found = self._merged(other)
        is_served = len(found.key.adapters) <= MOST_ADAPTERS
        is_served &= all(each.places(found) is not None for each in (self, other))
        is_served &= found.processors in (self.processors, other.processors) or not found._repeats_itself()
        return found if is_served and found._but_for_more() == self._but_for_more() == other._but_for_more() else None

    def places(self, wider: Kind) -> list[int | None] | None:
        """Returns which of this kind's processors each processor of a `wider` kind's step is; None for a neutral one.

        Returns None if the step lacks one of this kind's processors, or another one cannot be neutral.
        """
        found: list[int | None] = []
        own, count = self.processors or (), 0
        for each in wider.processors or ():
            is_own = count < len(own) and own[count] == each
            if not is_own and each.neutral is None:
                return None
            found.append(count if is_own else None)
            count += is_own
        return found if count == len(own) else None

    def numbers(self, wider: Kind) -> list[Sequence[float] | int]:
        """Returns for each processor of a `wider` kind's step the index of this kind's, or its neutral numbers."""
        places = self.places(wider)
        assert places is not None, "the step serves inputs of this kind"
        neutral = (each.neutral or () for each in wider.processors or ())
        return [other if place is None else place for place, other in zip(places, neutral, strict=True)]

    def _merged(self, other: Kind) -> Kind:
        made = None if self.processors is None else _merged(self.processors, other.processors or ())
        key = replace(
            self.key,
            samples=self.key.samples or other.key.samples,
            has_criteria=self.key.has_criteria or other.key.has_criteria,
            kept=tuple(name for name in RECORDS if name in (*self.key.kept, *other.key.kept)),
            processors=None if made is None else tuple(each.signature for each in made),
            adapters=in_order(*self.key.adapters, *other.key.adapters),
            maps_rows=self.key.maps_rows or other.key.maps_rows,
        )
        return self._replace(key=key, processors=made)

    def _repeats_itself(self) -> bool:
        """Whether it has more processors of one signature than a shared step is worth."""
        return max(Counter(each.signature for each in self.processors or ()).values(), default=0) > MOST_ALIKE

    def _but_for_more(self) -> Hashable:
        """Returns all that inputs must agree in, such as whether beams are drawn, which is another search."""
        samples = self.key.samples and self.key.early_stopping is not None
        key = replace(self.key, samples=samples, has_criteria=False, kept=(), processors=None, adapters=ACTIVE)
        key = replace(key, maps_rows=False)
        return self._replace(key=key, processors=None)


def _merged(one: tuple[Signed, ...], other: tuple[Signed, ...]) -> tuple[Signed, ...]:
    """Merges both, each in its order. A processor in both occurs once, if both have it in the library's order. The
    result does not depend on the order of the arguments: another order would need another recording.
    """
    if not (one and other):
        return one or other
    if one[0] == other[0]:
        return one[:1] + _merged(one[1:], other[1:])
    first, second = sorted(
        (one, other),
        key=lambda each: (each[0] in (other if each is one else one), each[0].rank, repr(each[0])),
    )
    return first[:1] + _merged(first[1:], second)
