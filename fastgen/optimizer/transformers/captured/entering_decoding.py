"""Calls whose inputs enter slots, and which of them can be in one step.

A step may do more than some inputs ask for, if it changes nothing for them: a processor with a neutral number, a draw
that a greedy row ignores, a copy of scores that is not kept.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.interrupts import cached_property
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.call import Call, fast_layers
from fastgen.optimizer.transformers.captured import graph_cache, processors
from fastgen.optimizer.transformers.captured.choice import RECORDS, HostCode, append
from fastgen.optimizer.transformers.captured.decoding import Decoding, recorded
from fastgen.optimizer.transformers.captured.forms import FormMask, FormProcessor
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.slot import Slot
from fastgen.optimizer.transformers.models import why_no_drafts
from fastgen.optimizer.transformers.row_adapters import ACTIVE, Adapters, in_order
from fastgen.optimizer.transformers.user_code import kind_of

# The most processors of one signature in a step that inputs of several kinds have brought. Each reads all scores in
# each step, and another number of them needs another recording. For a translator that forces a language token, there
# are as many as languages.
MOST_ALIKE = 4
# The most adapters that a step serves: it computes each adapter's product for all rows.
MOST_ADAPTERS = 8


class _HostCode(HostCode):
    """Code that may run the model, as guidance does, with the request's own adapter, also between steps."""

    def __init__(self, call: Call, arguments: dict[str, Any]) -> None:
        super().__init__(call, arguments)
        self._model, self._adapter = call.model, row_adapters.chosen(call.model)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), contextlib.ExitStack() as own:
            if self._adapter is not None:
                own.enter_context(fast_layers(self._model))
                own.enter_context(row_adapters.choosing(self._model, (self._adapter,)))
            yield

    def asks(self, criterion: Any) -> bool:
        # A criterion of infinite time only serves to stop a call, whose inputs are then taken out of their slots.
        return super().asks(criterion) and getattr(criterion, "max_time", None) != math.inf


class EnteringDecoding(Decoding):
    """One call after its prefill, in the form that `Slots` admits. It ends after its first token."""

    _code_type, _enters_slots = _HostCode, True

    def __init__(self, call: Any, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
        if arguments["generation_config"].do_sample:
            own = processors.with_temperature(arguments["logits_processor"])
            arguments = {**arguments, "logits_processor": own}
        super().__init__(call, arguments, model_kwargs)
        self.streamer = arguments.get("streamer")

    def _sign(self, given: Sequence[Any]) -> list[processors.Signed | None]:
        """Signs the processors. A single form of the result is data of the step, so that the host need not run it."""
        found, forms = super()._sign(given), [n for n, each in enumerate(given) if kind_of(each) is FormProcessor]
        if len(forms) == 1:
            ban_none = all(type(each) is library.RepetitionPenaltyLogitsProcessor for each in given[: forms[0]])
            found[forms[0]] = processors.Signed((FormMask, not ban_none))
        return found

    def slot(
        self,
        owner: Any,
        new_tokens: int | None,
        length: int | None,
        seed: int | None,
        own_processors: Sequence[Any] = (),
    ) -> Slot:
        """Returns one of its inputs, for slots.

        Args:
            owner: the object that the input belongs to.
            new_tokens: the most tokens that it may generate; None for as many as the call may.
            length: length of its prompt in tokens; None for the length of the call's prompts.
            seed: of its draws; None for a drawn seed.
            own_processors: processors that the input has besides those of the call's options.
        """
        generator = None
        if self.config.do_sample:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed)
        is_seen = self.own_key.waits_for_host or self.shared_processors is None
        # Criteria, of which there are none if several inputs enter, read what this call keeps.
        kept = self._code.kept if self.prompt.inputs == 1 else {name: [] for name in self._code.kept}
        host = self.host._replace(keep=partial(append, kept))
        most = self.prompt.new_tokens if new_tokens is None else new_tokens
        padding = 0 if length is None else self.prompt.tokens.shape[1] - length
        results = partial(_results, self._count, kept, self.config, self.output)
        forms = [each for each in own_processors if type(each) is FormProcessor]
        # If the inputs share no processors, the host runs the form with the others.
        form = forms[0] if forms and self.shared_processors is not None else None
        return Slot(
            owner,
            most,
            padding,
            results,
            host if is_seen else None,
            generator,
            self.streamer,
            form=form,
            are_banned=processors.Signed((FormMask, True)) in self._signed,
        )

    def _windows_of_key(self) -> tuple[int | None, ...]:
        """Returns the model's windows, because longer inputs may enter later."""
        return tuple(self._windows)

    @property
    def window(self) -> int | None:
        """The shortest sliding window of the model's layers; None if they see everything."""
        return min((window for window in self._windows if window), default=None)

    @property
    def numbers(self) -> list[tuple[float, ...]]:
        """The numbers of each processor, which belong to its inputs."""
        return [() if each is None else each.numbers for each in self._signed]

    @cached_property
    def shared_processors(self) -> tuple[processors.Signed, ...] | None:
        """What each processor does to all inputs of a step; None if one depends on the number of rows."""
        return processors.all_known([None if each is None else each.shared() for each in self._signed])


def _results(count: int, kept: dict[str, list[Tensor]], config: Any, output: Any, search: Search, inputs: slice) -> Any:
    """Returns what `generate` returns for an input, except a cache."""
    sequences = search.results(inputs, count)
    if not config.return_dict_in_generate:
        return sequences
    return output(sequences=sequences, **recorded(search, inputs, count, kept, config))


class Kind(NamedTuple):
    """The properties that inputs must share to be in one step at the same time.

    Attributes:
        key: what is frozen in the step, except its batch.
        processors: what processors do to all inputs; None if the host runs each input's own.
        eos: tokens that end a sequence.
        fill: the token that pads sequences after their ends.
    """

    key: Key
    processors: tuple[processors.Signed, ...] | None
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


def _merged(one: tuple[processors.Signed, ...], other: tuple[processors.Signed, ...]) -> tuple[processors.Signed, ...]:
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
