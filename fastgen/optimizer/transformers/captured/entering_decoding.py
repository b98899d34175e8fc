"""A call whose inputs enter slots: it ends after its first token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from fastgen.decoding.captured.search import Search
from fastgen.interrupts import cached_property
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.call import Call, fast_layers
from fastgen.optimizer.transformers.captured import processors
from fastgen.optimizer.transformers.captured.decoding import Decoding, recorded
from fastgen.optimizer.transformers.captured.forms import FormMask, FormProcessor
from fastgen.optimizer.transformers.captured.host import HostCode, append
from fastgen.optimizer.transformers.captured.slot import Slot
from fastgen.optimizer.transformers.user_code import kind_of


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
    """One call after its prefill, in the form that `Slots` admits."""

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
