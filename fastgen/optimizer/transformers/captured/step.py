"""A decode step that is replayed as a CUDA graph or, on a CPU, as a program: its parts, its buffers and its inputs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.capturable import capturable
from fastgen.decoding.captured.graph import CapturedPart, Piece
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.states import saved_states
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.interrupts import undoing
from fastgen.optimizer.transformers.captured.buffers import StepBuffers
from fastgen.optimizer.transformers.captured.choice import Choice, Host, Turn, search_of
from fastgen.optimizer.transformers.captured.forward import Forward
from fastgen.optimizer.transformers.captured.key import Key, Prompt, Sizes
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor

# Runs of a part on a GPU before it is captured. A step with drafts has several parts, each of which runs less often.
_WARM_UPS, _WARM_UPS_WITH_DRAFT = 2, 1
# Steps that a GPU may be ahead of the host, which does not know their outcome yet. On a CPU there are none.
_LATE = 2


class Parts:
    """The parts of a step: a draft, and one part for each number of positions to verify. Each is captured separately.

    All parts use the same buffers, and are replayed one after the other.

    Attributes:
        by_number: the parts; a positive number is the number of positions that the part verifies.
    """

    def __init__(self, key: Key, buffers: StepBuffers, forward: Forward) -> None:
        self._key, self._buffers, self._forward = key, buffers, forward
        self._is_recorded = graph.is_recorded(buffers.device)
        self.by_number: dict[int, CapturedPart] = {}

    def __getitem__(self, number: int) -> CapturedPart:
        if number not in self.by_number:
            on_gpu = _WARM_UPS if self._key.draft is None else _WARM_UPS_WITH_DRAFT
            warm_ups = 0 if self._is_recorded else on_gpu
            self.by_number[number] = CapturedPart(self._buffers.device, self._buffers.growing, warm_ups)
        return self.by_number[number]

    @property
    def is_captured(self) -> bool:
        return any(part.is_captured for part in self.by_number.values())

    @property
    def is_complete(self) -> bool:
        """Whether all parts are captured, so that an error says nothing about whether the step can be captured."""
        return bool(self.by_number) and all(part.is_captured for part in self.by_number.values())

    @property
    def follows(self) -> bool:
        """Whether the captured parts stay valid when the buffers get other memory."""
        return all(part.follows for part in self.by_number.values())

    def drop(self) -> None:
        """Forgets the captured parts."""
        for part in self.by_number.values():
            part.drop()

    def run(
        self, number: int, pieces: Callable[[], list[Piece]], cache: Any, *given: Any, captures: bool = True
    ) -> bool:
        """Runs a part. Returns whether it was replayed, so that its time is typical of later runs.

        A part that is not captured yet is captured now if `captures`. Before any part is captured, one must have run
        eagerly: while all rows are equally long, the host may look at masks.

        Args:
            pieces: returns the pieces of the part, if it is not captured yet.
            cache: the cache that the model gets.
            given: arguments for what the host does after a piece.
        """
        part = self[number]
        if part.is_captured:
            part.replay(*given)
            return True
        if captures and part.is_warm and self._forward.is_watched:
            self._buffers.begin_capture(is_first=not self.is_captured)
            part.capture(pieces(), *given)
            return False
        with undoing(partial(setattr, self._forward, "is_eager", False)):
            self._forward.is_eager = self._is_recorded and self._key.draft is None
            with contextlib.nullcontext() if self._forward.is_watched else self._forward.watched(cache):
                part.run(pieces(), *given)
        return False


class DecodeStep:
    """A decode step, its buffers, and its captured parts.

    A part verifies a number of positions, or drafts. A plain step verifies one position without a draft, which chooses
    the next token.

    Nothing of `prompt` is stored; it may be any prompt of the key's kind. `processors` is None if the host runs them.

    Args:
        drafting: makes what a step with drafts needs besides (`speculation.drafting`).
        search: the search of another step on the same sequences.
    """

    def __init__(
        self,
        key: Key,
        prompt: Prompt,
        processors: Sequence[CapturedProcessor] | None,
        sizes: Sizes,
        drafting: Callable[[DecodeStep, Prompt], Any] | None = None,
        search: SpeculativeSearch | None = None,
    ) -> None:
        self.key, self.processors, self.device = key, processors, prompt.tokens.device
        self.state: Hashable = None  # the model's state when the step is captured (`graph_cache.state`)
        self.buffers = StepBuffers(key, prompt, sizes)
        self.search: Any = search or search_of(key, sizes, self.device, self.buffers.growing)
        self.forward = Forward(key, prompt, self.buffers, self.search)
        self.parts = Parts(key, self.buffers, self.forward)
        self._cache = self.buffers.cache(self.search)
        self.flag = graph.LateFlag(self.device, 0 if key.waits_for_host else _LATE)
        self.seconds_of_calls: deque[float] = deque(maxlen=4)  # seconds per step in the last calls
        self.drafting: Any = None if drafting is None else drafting(self, prompt)
        record = None if self.drafting is None else self._record
        self.choice = Choice(key, prompt.logits.shape[-1], self.search, processors, record)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the buffers, which may grow if the key has no sizes."""
        return self.buffers.sizes

    @property
    def is_captured(self) -> bool:
        return self.parts.is_captured

    @property
    def nbytes(self) -> int:
        """Bytes of K and V and of what a call returns of each step. Intermediate results lie in shared memory."""
        return sum(part.nbytes for part in (self.buffers, self.choice, self.drafting) if part is not None)

    def make_room(self, needed: Sizes) -> None:
        """Grows the buffers to at least these sizes.

        Only sizes that the key leaves open grow; during a call, only the room for new tokens, whose contents stay.
        If memory runs out, nothing has changed.
        """
        self.reserve(needed)()

    def reserve(self, needed: Sizes) -> Callable[[], None]:
        """Allocates all memory that `make_room` needs. Returns a function that does the rest."""
        have, sizes = self.sizes, Sizes(*map(max, self.sizes, needed))
        if have.fit(needed):
            return lambda: None
        is_longer = (sizes.prompt, sizes.new) != (have.prompt, have.new)
        search = self.search.reserve(sizes.prompt, sizes.new) if is_longer else lambda: None
        return partial(self._grow, self.buffers.reserve(sizes), search)

    def _grow(self, buffers: Callable[[], bool], search: Callable[[], None]) -> None:
        still_holds = buffers()
        search()
        if not (still_holds and self.parts.follows):
            self.parts.drop()

    # ---- a call

    def begin(self, prompt: Prompt, fill: int, **options: Any) -> None:
        """Begins a call with this prompt. The other arguments are those of the search's `begin`."""
        # The search comes first: it refuses what does not fit before anything has been changed.
        self.search.begin(prompt.tokens, prompt.new_tokens, fill=fill, eos=prompt.eos, **options)
        if not self.buffers.begin(prompt):
            self.parts.drop()
        self.flag.reset()
        if self.drafting is not None:
            self.drafting.begin(prompt)

    def clear(self) -> None:
        """Discards K and V of the last call, which take no memory on a CPU from then on."""
        self.buffers.clear()

    def turns(self, host: Host, done: int) -> list[Turn]:
        """Returns the turn of a call, whose inputs are all equally long, after `done` tokens."""
        buffers = self.buffers
        return [Turn(host, slice(0, buffers.present), buffers.start, self.search.prompt_capacity + done)]

    def choose_first(self, logits: Tensor, host: Host) -> None:
        """Chooses the first token from the prompt's logits, [inputs * per_input, vocabulary]."""
        all_rows = logits.new_zeros(self.key.rows * self.key.codebooks.copies, logits.shape[-1])
        all_rows[: logits.shape[0]] = logits
        self.choice.first(all_rows, self._send, self.turns(host, 0))

    def is_over(self) -> bool:
        """Whether the search is known to be over. To be called after each token."""
        return self.flag.is_set()

    def of_batch(self, batch: int, sizes: Sizes) -> DecodeStep:
        """Returns a step for `batch` inputs that looks the same to the model, for recording: nothing runs on it."""
        buffers = self.buffers
        prompt = Prompt(
            tokens=self.search.tokens.new_empty(0, 0),
            new_tokens=1,
            cached=0,
            own=[kv.like() for kv in buffers.own],
            cross=[kv.like() for kv in buffers.cross],
            span=(buffers.position.position[:0], buffers.position.position[:0]),
            cross_span=None,
            tensors=buffers.inputs,
            logits=self.forward.nothing.new_empty(0, self.choice.vocabulary),
            states=[each.buffers for each in buffers.states],
            forms=self.key.forms,
        )
        processors = None if self.processors is None else [each.of_batch(batch) for each in self.processors]
        step = DecodeStep(replace(self.key, batch=batch), prompt, processors, sizes)
        step.choice.take_over(self.choice)
        if self.search.noise is not None:
            step.search.noise = torch.ones(step.key.rows, prompt.logits.shape[-1], dtype=torch.float32)
        step.forward.is_watched = True
        step.buffers.like(buffers)
        return step

    def pieces(self, model: Any) -> list[Piece]:
        """Returns the pieces of a plain step, each with what the host does after it."""
        return self.choice.pieces(partial(self._logits, model), self._advance)

    def verify(self, model: Any, turns: Sequence[Turn], captures: bool = True) -> None:
        """Starts the step for the next token. With a draft, `drafting.verify` replaces it.

        A step that is not captured yet is captured now if `captures`; otherwise it runs eagerly. On a GPU, the first
        steps run eagerly in any case.

        Raises:
            CannotBeCaptured: the step does something that cannot be captured. Any other exception that is raised before
                there is a graph means the same.
        """
        if captures and not self.forward.is_watched and graph.is_recorded(self.device):
            self.watch(model)
        self.parts.run(1, partial(self.pieces, model), self._cache, turns, captures=captures)

    def materialized(self) -> tuple[Any, Any, Any]:
        """Returns K and V of self- and of cross-attention, layer by layer, [rows of the inputs, heads, positions, dim],
        and the states of layers that have some.

        Self-attention has positions of the prompt and of all tokens but the last. Waits for the device.
        """
        return self.buffers.materialized(int(self.search.length.max()) - self.sizes.prompt - 1)

    def take_over(self, other: DecodeStep) -> None:
        """Continues `other`, a step of the same key with less capacity."""
        if not self.buffers.insert(other.buffers, slice(None)):
            self.parts.drop()
        self.search.insert(other.search, slice(None))
        self.choice.take_over(other.choice)
        self.flag.reset()
        if self.drafting is not None:
            self.forward.is_watched |= other.forward.is_watched  # the other step may have looked at the masks already
            self.drafting.take_over(other.drafting)

    def watch(self, model: Any) -> None:
        """Looks at the masks by running a step ahead of time, which the real step repeats.

        Raises:
            CannotBeCaptured: as in `verify`.
        """
        # The real step stores the same K and V once more. States would advance twice, so they are restored.
        with undoing(saved_states(self.buffers.states)), self.forward.watched(self._cache):
            capturable(partial(self._logits, model))()

    # ---- slots: inputs come and go while others continue

    def open(self, eos: Sequence[int]) -> None:
        """Begins without inputs. Tokens of `eos` end the sequences of all inputs to come."""
        self.search.put_ends(eos)
        self.buffers.present = self.key.batch
        self.leave(slice(self.key.batch))
        self.choice.prepare()
        self.flag.reset()

    def arrival(
        self, prompt: Prompt, fill: int, numbers: Sequence[Sequence[float]], **options: Any
    ) -> tuple[Search, Choice]:
        """Returns the search of one input that is about to enter, and the choice of its first token.

        Args:
            numbers: of each of its processors.
            options: of the search's `begin`.
        """
        key = replace(self.key, batch=1)
        search = search_of(key, self.sizes, self.device)
        search.begin(prompt.tokens, prompt.new_tokens, fill=fill, eos=prompt.eos, **options)
        processors = None if self.processors is None else [each.of_batch(1) for each in self.processors]
        for each, own in zip(processors or (), numbers, strict=processors is not None):
            each.put(own)
        return search, Choice(key, prompt.logits.shape[-1], search, processors)

    def load(self, place: int, prompt: Prompt) -> None:
        """Takes over what the prefill of an input has stored."""
        if not self.buffers.begin(prompt, slice(place, place + 1)):
            self.parts.drop()

    def enter(self, place: int, search: Search, choice: Choice) -> None:
        """Has the input continue from its first token."""
        self.search.insert(search, slice(1), slice(place, place + 1))
        self._take_choice(choice, 0, place)
        self.flag.reset()

    def leave(self, inputs: slice) -> None:
        """Ends inputs: results of their places do not count until other inputs take these places."""
        self.search.leave(inputs)
        self.buffers.leave(inputs)

    def move(self, source: int, target: int) -> None:
        """Moves an input to another place, which is free."""
        self.move_in(self, source, target)
        self.leave(slice(source, source + 1))

    def move_in(
        self, other: DecodeStep, source: int, target: int, numbers: Sequence[Sequence[float] | int] | None = None
    ) -> None:
        """Has the input at `source` in `other`, a step of the same sizes, continue here at `target`.

        Args:
            numbers: for each processor, the input's numbers, or the index of the processor of `other` that has them.
                None if the processors are the same.
        """
        inputs = slice(source, source + 1), slice(target, target + 1)
        self.search.insert(other.search, *inputs)
        if not self.buffers.insert(other.buffers, *inputs):
            self.parts.drop()
        self._take_choice(other.choice, source, target, numbers)
        self.forward.is_watched |= other.forward.is_watched

    def _take_choice(
        self, other: Choice, source: int, target: int, numbers: Sequence[Sequence[float] | int] | None = None
    ) -> None:
        """Copies what belongs to an input besides its sequences, from place `source` of `other` to `target`."""
        self.choice.take_over(other)
        others, own = other.processors or (), self.processors or ()
        for each, given in zip(own, range(len(others)) if numbers is None else numbers, strict=True):
            if isinstance(given, int):
                each.insert(others[given], source, target)
            else:
                each.put(given, target)

    # ---- what is captured

    def _send(self) -> None:
        self.flag.send(self.search.done)

    def _advance(self) -> None:
        """Advances the buffers once K and V are stored: the next step continues the rows that the search has chosen."""
        self.buffers.advance(self.search.parents, self.search.taken.view(-1))
        self._send()

    def _record(self, given: Tensor, place: int) -> None:
        self.drafting.record(given.unsqueeze(1), place)

    def _logits(self, model: Any) -> Tensor:
        """Returns the logits, [rows, vocabulary], for the tokens that the search has chosen."""
        tokens, cache = self.search.tokens.unsqueeze(1), self.forward.cache(model, self._cache)
        inputs = self.buffers.of_step(self.search.length.view(-1))
        return self.forward(model, cache, tokens, inputs, 1)[:, -1]
