"""A captured step whose inputs come and go: continuous batching.

Each input has a place among those of the step, and a length of its own. It enters behind its prefill, with its first
token, and leaves when its search is over. Nothing is recorded for that.

`taking` says who gets the calls of `generate` that are made to let inputs enter: such a call runs up to its decoding
loop, and returns its prompt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastgen import memory, settings
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.interrupts import undoing
from fastgen.optimizer.transformers.call import fast_layers
from fastgen.optimizer.transformers.captured import graph_cache, sizes
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.guest import Guest
from fastgen.optimizer.transformers.captured.host_work import Turn
from fastgen.optimizer.transformers.captured.key import Key, Prompt
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.captured.step import DecodeStep

# Who gets a call behind its prefill, and returns whether it takes its inputs.
Taker = Callable[[Decoding], None]
_taker: ContextVar[Taker | None] = ContextVar("fastgen_taker", default=None)


@contextlib.contextmanager
def taking(taker: Taker) -> Iterator[None]:
    """In this context, calls of `generate` end behind their prefill, and their inputs go to `taker`.

    It raises CannotBeCaptured for a call that is to run as ever.
    """
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


def taker() -> Taker | None:
    """Who gets the call of this thread."""
    return _taker.get()


@contextlib.contextmanager
def running(device: torch.device) -> Iterator[None]:
    """The context in which steps run. It waits for calls of other threads that have captured steps.

    What the steps write may be written to outside of inference mode, too.
    """
    modes = undoing(partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))
    with graph.taken(device, always_waits=True), modes, torch.no_grad(), torch._C._InferenceMode(False):
        yield


class Slots:
    """A step of a model, and the inputs in it. All agree in what is frozen in the step, and in what it has as data.

    Args:
        decoding: the first call whose inputs are to enter.
        most: places, at the most.

    Attributes:
        guests: by place.

    Raises:
        CannotBeCaptured: inputs of such calls cannot come and go.
    """

    def __init__(self, decoding: Decoding, most: int) -> None:
        self._model, self._most = decoding.model, most
        self._key = key_of(decoding)
        self._eos, self._fill = decoding.prompt.eos, decoding.fill()
        self._ledger = Ledger.of(self._model)
        self._steps, self._eager_steps, self._captures_from = 0, 0, math.inf
        self.guests: dict[int, Guest] = {}
        self._step: DecodeStep | None = None

    @property
    def rows(self) -> int:
        """Of the inputs that are there."""
        return len(self.guests) * self._key.per_input

    @property
    def is_new(self) -> bool:
        """Whether it has made no step."""
        return self._steps == 0

    @property
    def is_stale(self) -> bool:
        """Whether the model is no longer the one that the step was made with."""
        return self._step is not None and graph_cache.state(self._model) != self._step.state

    # ---- inputs that come

    def admit(self, decoding: Decoding, guests: list[Guest], expected: int) -> None:
        """Takes in the inputs of a call behind its prefill, with their first tokens.

        Args:
            expected: inputs that are likely to come soon.
        """
        prompts = [
            decoding.prompt.only(number, self._key.per_input, guest.new_tokens, guest.padding)
            for number, guest in enumerate(guests)
        ]
        needed = Sizes(*map(max, *map(_sizes_of, prompts), Sizes(0, 0, 0, 0)))
        step = self._with_room(decoding, len(self.guests) + max(len(guests), expected), needed)
        for guest, prompt in zip(guests, prompts, strict=True):
            self._note(guest, prompt, decoding)
            self._enter(step, guest, prompt, decoding)

    def _enter(self, step: DecodeStep, guest: Guest, prompt: Prompt, decoding: Decoding) -> None:
        options = {"length_penalty": decoding.config.length_penalty} if self._key.early_stopping is not None else {}
        search, choice = step.arrival(prompt, self._fill, **options)
        if guest.generator is not None:
            search.noise = torch.empty(self._key.per_input, prompt.logits.shape[-1])
            search.noise.exponential_(generator=guest.generator)
        start, end = int(search.start[0, 0]), search.prompt_capacity
        turns = [] if guest.host is None else [Turn(guest.host, slice(0, 1), start, end)]
        choice.first(prompt.logits, lambda: None, turns)
        step.choice.host_work.take_over(choice.host_work)
        place = next(place for place in range(self._key.batch) if place not in self.guests)
        step.enter(place, prompt, search)
        guest.place, self.guests[place] = place, guest
        self._stream(step, guest)

    def _note(self, guest: Guest, prompt: Prompt, decoding: Decoding) -> None:
        """Whether recording pays is a matter of all inputs that have come so far."""
        if settings.current().captured_step == "always":
            self._captures_from = 0
            return
        starts = self._ledger.starts_at(self._key, decoding.certain_tokens, prompt.new_tokens)
        if starts is not None:
            self._captures_from = min(self._captures_from, self._steps + starts)

    def _with_room(self, decoding: Decoding, inputs: int, needed: Sizes) -> DecodeStep:
        """The step, with room for so many inputs, where there is such, and for what they need."""
        batch = min(max(_power_of_two(inputs), self._key.batch if self._step is not None else 1), self._most)
        if self._step is None:
            self._step = self._taken(decoding, batch, needed)
            self._step.open(self._eos)
        self._step.make_room(self._rounded(decoding, needed))
        if batch > self._step.key.batch:
            self._step = self._moved(decoding, batch)
        self._key = self._step.key
        return self._step

    def _taken(self, decoding: Decoding, batch: int, needed: Sizes) -> DecodeStep:
        """The step for so many inputs, as the cache has it or a new one."""
        key = replace(self._key, batch=batch)
        vocabulary = decoding.prompt.logits.shape[-1]
        room = self._rounded(decoding, needed)

        def make() -> DecodeStep:
            return DecodeStep(key, decoding.prompt, decoding.captured_processors(key), room)

        step: DecodeStep = graph_cache.take(self._model, key, make)
        if not decoding.refresh(step.processors or ()):
            step = make()
            step.state = graph_cache.state(self._model)
        step.make_room(room)
        step.search.noise = torch.ones(key.rows, vocabulary) if key.samples else None
        return step

    def _rounded(self, decoding: Decoding, needed: Sizes) -> Sizes:
        return sizes.rounded(needed, decoding.may_pad, on_gpu=False, at_once=True)

    def _moved(self, decoding: Decoding, batch: int) -> DecodeStep:
        """A step for more inputs, with those that are there."""
        before = self._step
        assert before is not None
        step = self._taken(decoding, batch, before.sizes)
        before.make_room(step.sizes)
        step.make_room(before.sizes)
        step.open(self._eos)
        for place in self.guests:
            step.move_in(before, place, place)
        graph_cache.give_back(self._model, before)
        return step

    # ---- a step

    def advance(self) -> list[Guest]:
        """Makes a step, in the context `running`; those that are over then, or before. They are still in their places."""
        step = self._step
        assert step is not None, "somebody is there"
        over = self._over(step)
        if over:
            return over
        for guest in self.guests.values():
            self._draw(step, guest)
        turns = self._turns(step) if self._key.waits_for_host else []
        with contextlib.nullcontext() if step.is_captured else fast_layers(self._model):
            self._verify(step, turns)
        self._steps += 1
        self._eager_steps += not step.is_captured
        for guest in self.guests.values():
            self._stream(step, guest)
        return self._over(step)

    def _verify(self, step: DecodeStep, turns: list[Turn]) -> None:
        try:
            step.verify(self._model, turns, self._steps >= self._captures_from)
        except Exception as error:
            if not (step.parts.is_complete or memory.is_out(error)):
                graph_cache.refuse(self._model, step.key, str(error))
            raise
        if bool(step.search.has_nan):
            raise ValueError("probabilities to draw from are not numbers")

    def _over(self, step: DecodeStep) -> list[Guest]:
        goes_on = step.search.unfinished.view(self._key.batch, -1).any(dim=1).tolist()
        return [guest for place, guest in self.guests.items() if guest.error is not None or not goes_on[place]]

    def _turns(self, step: DecodeStep) -> list[Turn]:
        starts, ends = step.search.start[:, 0].tolist(), step.search.length[:, 0].tolist()
        return [
            Turn(guest.host, slice(place, place + 1), starts[place], ends[place])
            for place, guest in self.guests.items()
            if guest.host is not None
        ]

    def _draw(self, step: DecodeStep, guest: Guest) -> None:
        """The noise of an input's next step."""
        if guest.generator is not None:
            rows = step.search.noise.view(self._key.batch, -1)[guest.place]
            rows.exponential_(generator=guest.generator)

    def _stream(self, step: DecodeStep, guest: Guest) -> None:
        if guest.put is not None:
            guest.catch(partial(guest.put, step.search.tokens[guest.place : guest.place + 1].clone()))

    # ---- inputs that leave

    def result(self, guest: Guest) -> Tensor:
        """The sequences of an input that is over, [count, length of the longest], with its prompt."""
        assert self._step is not None, "the input is in it"
        search, inputs = self._step.search, slice(guest.place, guest.place + 1)
        self._ledger.note_call(self._key, int(search.length[inputs].max()) - search.prompt_capacity, True, 0)
        return search.results(inputs, guest.count)

    def remove(self, guest: Guest) -> None:
        """The input leaves; it may have come to its end, or not."""
        assert self._step is not None, "the input is in it"
        self._step.leave(guest.place)
        del self.guests[guest.place]

    @property
    def slots(self) -> int:
        """Rows of the step."""
        return self._key.rows

    def drop(self) -> None:
        """The step serves nobody any more."""
        self._step = None

    def close(self) -> None:
        """Nobody is left. What is captured is kept for those that come later."""
        step, self._step = self._step, None
        if step is not None and step.is_captured:
            graph_cache.give_back(self._model, step)


def key_of(decoding: Decoding) -> Key:
    """What is frozen in a step that inputs of such a call enter; its batch says nothing.

    Raises:
        CannotBeCaptured: they cannot.
    """
    key: Key = decoding.own_key
    if not graph.is_recorded(decoding.model.device):
        raise CannotBeCaptured("inputs come and go on the CPU only, so far")
    if key.kept or decoding.config.return_dict_in_generate:
        raise CannotBeCaptured("what is returned of every step is that of a call of its own")
    if key.source_in_front or key.width > 1:
        raise CannotBeCaptured("a model whose inputs cannot come and go")
    if decoding.processors_data is None:
        key = replace(key, processors=None)  # the host runs them, for each input its own
    return replace(decoding.of_any_sizes(key), batch=1, slots=True)


def identity(decoding: Decoding) -> Hashable:
    """Inputs of calls that agree in it can be in one step at a time."""
    key = key_of(decoding)
    return key, key.processors and decoding.processors_data, decoding.prompt.eos, decoding.fill()


def _sizes_of(prompt: Prompt) -> Sizes:
    source = prompt.cross[0][0].shape[2] if prompt.cross else 0
    return Sizes(prompt.tokens.shape[1], prompt.stored, prompt.new_tokens, source)


def _power_of_two(inputs: int) -> int:
    return 1 << max(inputs - 1, 0).bit_length()
