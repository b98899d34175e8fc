"""A decoding step of a model that a CUDA graph or, on the CPU, a program replays, with all the buffers that it needs.

`model.forward` is the model's own, and so is what prepares its inputs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import patching, releases
from fastgen.decoding import beams, layer_forms
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.growing import LEAST_LENGTH, Growing
from fastgen.decoding.captured.kv import StaticKV, StepState
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.search import NOTHING, BeamSearch, RowSearch
from fastgen.decoding.captured.symbolic_length import Ranges, SymbolicLength
from fastgen.decoding.norms import fused
from fastgen.decoding.shared import CannotBeCaptured
from fastgen.ops import search_step
from fastgen.optimizer.transformers.cache import cache_of
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.models import counts_on_the_host

# Steps that run before one is captured: kernels are compiled, and libraries prepare what they need.
_WARM_UPS = 2
# Steps under way on a GPU that the host does not know the outcome of. On the CPU there are none.
_LATE = 2
# Masks, which are among the inputs of the model.
MASKS = ("attention_mask", "decoder_attention_mask")
# Inputs of the model that go up by one in every step.
POSITIONS = ("position_ids", "decoder_position_ids")


class Host(NamedTuple):
    """What of a step the host does: the processors, the stopping criteria, and what is returned of every step."""

    process: Callable[[Tensor, Tensor], Tensor]  # (tokens [rows, length], scores [rows, vocabulary]) -> scores
    stops: Callable[[Tensor], Tensor]  # tokens [continuations, length] -> [continuations], bool
    keep: Callable[[dict[str, Tensor]], None]  # what the call returns of a step, by name: [rows, vocabulary] each


_is_eager: ContextVar[bool] = ContextVar("fastgen_eager_step", default=False)


def _capturable(parts: list[Part]) -> list[Part]:
    return [(graph.capturable(part), on_host) for part, on_host in parts]


# What a search chooses from, and whether it has to be normalised: the arguments of its `propose`.
Scores = tuple[Tensor, bool]
# What the host does after a part of a step, from the number of tokens that there are; and such a part, with that.
OnHost = Callable[["CapturedStep", Host, int], None]
Part = tuple[Callable[[], object], OnHost | None]


@dataclass(frozen=True)
class Key:
    """All that is frozen in a captured step: calls that agree on it can share one."""

    batch: int
    per_input: int
    sizes: Sizes
    width: int  # positions that a step stores
    encoder: tuple[type, int] | None  # the class that its output comes in, and the width of that
    source_in_front: bool  # K and V of the encoder's output are those of self-attention, in front of the sequences'
    early_stopping: bool | str | None  # of beam search; None for sequences that are continued for themselves
    samples: bool  # tokens are drawn
    ends: int  # as many tokens may end a sequence
    processors: tuple[Hashable, ...] | None  # signatures; None if the host runs the processors
    has_criteria: bool  # there are stopping criteria, which the host runs, besides the search's own
    kept: tuple[str, ...]  # what the call returns of every step: scores, logits
    tensors: tuple[str, ...]  # names of the model's inputs that are in buffers
    constants: tuple[tuple[str, Hashable], ...]  # the others, by name
    kv: Hashable  # shapes and dtypes of K and V of each layer
    windows: tuple[int | None, ...]  # the sliding window of each layer; None for one that sees everything
    # Hashable: what drafts, where a step checks what is drafted; its width is the most that it checks.
    draft: Any = None

    @property
    def rows(self) -> int:
        return self.batch * self.per_input

    @property
    def waits_for_host(self) -> bool:
        """Whether the host does a part of each step: processors, criteria, or keeping what the call returns."""
        return self.processors is None or self.has_criteria or bool(self.kept)


@dataclass
class Prompt:
    """What a step begins from: the result of the prefill, one row per input."""

    tokens: Tensor  # [inputs, N], int64
    new_tokens: int  # to generate, at the most
    stored: int  # positions of self-attention that the prefill has left
    # K and V of each layer, [inputs, heads, stored, dim]; with a sliding window maybe only the last of these positions.
    own: list[tuple[Tensor, Tensor]]
    cross: list[tuple[Tensor, Tensor]]  # [inputs, heads, encoder positions, dim]; empty without cross-attention
    span: tuple[Tensor, Tensor]  # [inputs] starts and ends of the positions that count
    cross_span: tuple[Tensor, Tensor] | None
    tensors: dict[str, Tensor]  # the model's inputs of the first step, [inputs, ...], by name
    logits: Tensor  # [inputs * per_input, vocabulary]: of the last position of the prompt
    eos: tuple[int, ...] = ()  # tokens that end a sequence

    @property
    def inputs(self) -> int:
        return self.tokens.shape[0]


class CapturedStep:
    """The step, its buffers, and, once it has been captured, its graphs or programs.

    Of `prompt`, any of the key's kind, nothing is stored. `processors` is None if the host runs them.

    Attributes:
        sizes: those of its buffers; where the key has none, they may grow.
    """

    def __init__(self, key: Key, prompt: Prompt, processors: Sequence[CapturedProcessor] | None, sizes: Sizes) -> None:
        self.key, self.sizes = key, sizes
        self._growing = Growing() if key.sizes.new == 0 else None
        self.state: Hashable = None  # of the model that it is captured with
        self.processors = processors
        self.device = device = prompt.tokens.device
        growing = self._growing
        self._state = StepState(key.batch, key.per_input, sizes.new + key.width - 1, device, key.width, growing)
        self._own = [
            StaticKV(*kv, self._state, sizes.stored, has_suffix=True, window=window, growing=growing)
            for kv, window in zip(prompt.own, key.windows, strict=True)
        ]
        self._cross = [
            StaticKV(*kv, self._state, sizes.source, has_suffix=False, growing=growing) for kv in prompt.cross
        ]
        ends = [NOTHING] * key.ends  # each call says which
        self.search = self._new_search(
            key.batch, key.per_input, sizes.prompt, sizes.new, device, ends, samples=key.samples, growing=growing
        )
        self._stored = torch.full((), sizes.stored, dtype=torch.int64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)
        # Of the call that asks for most so far: a model's table of positions may be shorter than the buffers.
        self._most_new = 1
        self._bounds = SymbolicLength.of(self._seen, sizes.stored, sizes.stored + 1)
        self._cache = cache_of(self._own, self._cross, self._bounds)
        self._inputs = {name: self._buffer(name, prompt.tensors[name]) for name in key.tensors}
        # K and V of the encoder's output are stored. A model that reads it nevertheless gets NaN, which is seen.
        self._nothing = torch.full((1, 1, 1), torch.nan, dtype=prompt.logits.dtype, device=device)
        # What the host's processors and criteria get and give.
        scores_of_host = (key.rows, prompt.logits.shape[-1]) if processors is None else (0,)
        self._scores = torch.zeros(scores_of_host, dtype=torch.float32, device=device)
        sizes_of_kept = key.rows, prompt.logits.shape[-1]
        self._kept = {name: torch.zeros(sizes_of_kept, dtype=torch.float32, device=device) for name in key.kept}
        self._proposal: tuple[Tensor, ...] = ()
        self._stops = torch.zeros(0, dtype=torch.bool, device=device)
        self._flag = graph.LateFlag(device, 0 if key.waits_for_host else _LATE)
        self._start = 0  # where the sequences begin in their buffers
        # Of the call: its inputs, and the positions that the prefill has stored in each layer.
        self._present = 0
        self._last: Tensor | None = None  # what a criterion has written in the place of the last tokens
        self._lengths: tuple[list[int], list[int]] = ([], [])
        self._graphs: list[tuple[graph.Graph | Program, OnHost | None]] = []
        self.seconds_of_calls: deque[float] = deque(maxlen=4)  # what a step of the last calls has taken
        self._eager_steps = 0

    def _new_search(self, *sizes: Any, samples: bool, growing: Growing | None) -> BeamSearch | RowSearch:
        if self.key.early_stopping is None:
            return RowSearch(*sizes, samples=samples, growing=growing)
        sorts, stops = samples and releases.sorts_drawn_candidates(), self.key.early_stopping
        return BeamSearch(*sizes, early_stopping=stops, samples=samples, sorts=sorts, growing=growing)

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be captured, so that what fails may work the next time."""
        return self.is_captured

    @property
    def nbytes(self) -> int:
        """Of K and V, and of what a call returns of each step; what is computed lies in memory that all steps share."""
        of_host = (*self._kept.values(), self._scores, *self._inputs.values(), *self._proposal)
        return sum(kv.nbytes for kv in (*self._own, *self._cross)) + sum(buffer.nbytes for buffer in of_host)

    def _buffer(self, name: str, first: Tensor) -> Tensor:
        """Where an input of the model is: [rows, width], with a width for the positions to come, too."""
        buffer = torch.zeros(self.key.rows, self._width_of(name), dtype=first.dtype, device=first.device)
        if self._growing is not None and name in MASKS:
            self._growing.add(buffer)
        return buffer

    def _width_of(self, name: str) -> int:
        if self._grows(name):
            return self.sizes.stored + self.sizes.new
        return self.sizes.source if name == "attention_mask" else 1

    # ---- the sizes of the buffers

    @property
    def follows(self) -> bool:
        """Whether what has been captured goes on when the buffers get other memory."""
        return all(made.follows for made, _ in self._graphs)

    def make_room(self, needed: Sizes) -> None:
        """Has the buffers grow to these sizes at least: of those that the key leaves open, and between two calls all.

        In a call, what is generated may get more room; what is there stays.
        """
        have = self.sizes
        if have.fit(needed):
            return
        self.sizes = sizes = Sizes(*map(max, have, needed))
        if sizes.stored > have.stored:
            for kv in self._own:
                kv.grow_prefix(sizes.stored)
            self._stored.fill_(sizes.stored)
        if sizes.source > have.source:
            for kv in self._cross:
                kv.grow_prefix(sizes.source)
        if sizes.new > have.new:
            for kv in self._own:
                kv.grow_suffix(sizes.new + self.key.width - 1)
            self._state.grow(sizes.new + self.key.width - 1)
        if (sizes.prompt, sizes.new) != (have.prompt, have.new):
            self.search.grow(sizes.prompt, sizes.new)
        for name, buffer in self._inputs.items():
            if (width := self._width_of(name)) != buffer.shape[1]:
                larger = buffer.new_zeros(len(buffer), width)
                larger[:, : buffer.shape[1]] = buffer
                assert self._growing is not None, "a key without sizes is one of buffers that grow"
                self._growing.exchange(buffer, larger)
        self._move_bounds()
        if not self.follows:
            self._graphs = []

    def _move_bounds(self) -> None:
        """Says how long the cache can be now. Drops what was captured when the model was told what is no longer so."""
        if not self._bounds.move(self.sizes.stored, self.sizes.stored + min(self._most_new, self.sizes.new)):
            self._graphs = []

    def _lengths_in_positions(self) -> frozenset[int]:
        """What a program must have in nothing but the buffers that grow."""
        prompt, stored, new, source = self.sizes
        suffix = self._state.capacity
        found = (prompt, stored, new, source, suffix, prompt + new, stored + new, stored + suffix, new + 2)
        exact = {size for size in self.key.sizes if size}
        return frozenset(size for size in found if size >= LEAST_LENGTH) - exact

    # ---- a call

    def begin(self, prompt: Prompt, fill: int, inputs: slice = slice(None), **options: Any) -> None:
        """Takes over a prompt. The other arguments are those of the search's `begin`.

        That of single `inputs`, which begin while others go on, has K and V of all tokens but the last: the next step
        reads that one, as its tensors say, and chooses the first token. ValueError: they can only begin together.
        """
        key = self.key
        is_by_row = key.processors == () and not (key.has_criteria or key.kept or key.encoder or any(key.windows))
        is_by_row &= {"attention_mask", "position_ids"} <= {*key.tensors} and prompt.new_tokens <= self.sizes.new
        is_by_row &= not key.samples and inputs.step in (None, 1)
        if inputs != slice(None) and not is_by_row:
            raise ValueError("inputs of this step can only begin together")
        # First: it refuses what does not fit, and nothing has been changed then.
        self.search.begin(prompt.tokens, prompt.new_tokens, fill=fill, eos=prompt.eos, inputs=inputs, **options)
        for kv, (keys, values) in zip(self._own, prompt.own, strict=True):
            dropped = prompt.stored - keys.shape[2]
            starts, ends = ((bound - dropped).clamp(min=0) for bound in prompt.span)
            kv.load(keys, values, starts, ends, at_end=not self.key.source_in_front, inputs=inputs)
        for kv, (keys, values) in zip(self._cross, prompt.cross, strict=True):
            assert prompt.cross_span is not None, "what is stored of the encoder's output has a span"
            kv.load(keys, values, *prompt.cross_span, at_end=False, inputs=inputs)
        for name, buffer in self._inputs.items():
            self._fill(name, buffer.view(key.batch, key.per_input, -1)[inputs].flatten(0, 1), prompt.tensors[name])
        if inputs == slice(None):
            self._present, self._start = prompt.inputs, self.sizes.prompt - prompt.tokens.shape[1]
            self._lengths = [kv[0].shape[2] for kv in prompt.own], [kv[0].shape[2] for kv in prompt.cross]
        self._state.begin(inputs)
        self._measure()
        self._flag.reset()
        self._most_new = max(self._most_new, prompt.new_tokens)
        self._move_bounds()

    def _fill(self, name: str, buffer: Tensor, given: Tensor) -> None:
        given = given.repeat_interleave(self.key.per_input, dim=0)
        end = self.sizes.stored if self._grows(name) else given.shape[1]
        buffer.zero_()
        buffer[: given.shape[0], end - given.shape[1] : end] = given
        if self._grows(name):
            buffer[:, end] = 1  # that of the first step

    def _grows(self, name: str) -> bool:
        """Whether an input is a mask of the sequences, and not of what the encoder has read."""
        return name == ("attention_mask" if self.key.encoder is None else "decoder_attention_mask")

    def _extend(self, mask: Tensor) -> None:
        """The position of the next step counts; those behind it do not: models count the ones."""
        columns = torch.arange(-self.sizes.stored, self.sizes.new, device=mask.device)
        mask.masked_fill_(columns == self._state.position.unsqueeze(1), 1)

    def clear(self) -> None:
        """K and V of the last call are of no use any more. On a CPU they take no memory then."""
        if not self._present:  # done since the last call
            return
        self._present = 0
        if all([kv.clear() for kv in (*self._own, *self._cross)]):
            self._state.begin()

    def choose_first(self, logits: Tensor, host: Host) -> None:
        """The first token, from the prompt's logits, [inputs * per_input, vocabulary]."""
        all_rows = logits.new_zeros(self.key.rows, logits.shape[-1])
        all_rows[: logits.shape[0]] = logits
        self._run(_capturable(self._parts(lambda: all_rows, self._send)), 0, host)

    def is_over(self) -> bool:
        """To be called after each token: whether the search is known to be over."""
        return self._flag.is_set()

    def start(self, model: Any, done: int, host: Host, captures: bool = True) -> None:
        """Starts the step for the token after `done` of them.

        One that is not captured yet is captured now, if it is to be; otherwise it runs as it is, as on a GPU the first
        ones do in any case.

        Raises:
            CannotBeCaptured: it does something that a captured step cannot do. Anything else that is raised before
                there is a graph means that, too.
        """
        graphs = self._graphs
        if not graphs:
            parts = self._parts(lambda: self._logits(model), self._advance)
            is_recorded = graph.is_recorded(self.device)
            if not captures or not (is_recorded or self._eager_steps >= _WARM_UPS):
                self._run_eagerly(parts if is_recorded else _capturable(parts), done, host)
                return
            graphs = self._captured(_capturable(parts), model)
        self._run([(made.replay, on_host) for made, on_host in graphs], done, host)
        self._graphs = graphs  # one that cannot be replayed is none

    def _run_eagerly(self, parts: list[Part], done: int, host: Host) -> None:
        """A step that is not captured."""
        run = partial(self._run, parts, done, host)
        with patching.held(_is_eager, graph.is_recorded(self.device)):
            if self._eager_steps == 0:
                self._watched(run)
            else:
                run()
        self._eager_steps += 1

    def _captured(self, parts: list[Part], model: Any) -> list[tuple[graph.Graph | Program, OnHost | None]]:
        if self._eager_steps == 0:
            self._rehearse(model)
        self._bounds.answers.clear()
        graphs = [(self._capture(part), on_host) for part, on_host in parts]
        del self._logits_seen  # it would keep its memory in the pool that all graphs share
        return graphs

    def _rehearse(self, model: Any) -> None:
        """Runs the model for a step to come, which will store the same keys and values once more."""
        self._watched(graph.capturable(lambda: self._logits(model)))

    def _watched(self, run: Callable[[], object]) -> None:
        """Runs what is not captured while the host looks at what it may not look at later."""
        for kv in (*self._own, *self._cross):
            kv.host_may_wait = True
        run()
        for kv in (*self._own, *self._cross):
            kv.host_may_wait = False
        if bool(self._logits_seen[: self._present * self.key.per_input].isnan().any()):
            raise CannotBeCaptured("the model reads the encoder's output besides the stored keys and values")

    def _parts(self, logits: Callable[[], Tensor], end: Callable[[], None]) -> list[Part]:
        """From the logits to the chosen tokens, and what ends the step; cut where the host does something."""
        parts: list[Part] = []
        scores = partial(self._processed, logits)
        if self.processors is None:
            parts.append((partial(self._put_scores, logits), CapturedStep._process_on_host))
        if self.key.has_criteria:
            parts += [
                (partial(self._put_proposal, scores), CapturedStep._stop_on_host),
                (partial(self._take, end), CapturedStep._write_last),
            ]
        else:
            parts.append((partial(self._choose, scores, end), CapturedStep._keep_on_host if self._kept else None))
        return parts

    def _run(self, parts: list[Part], done: int, host: Host) -> None:
        for part, on_host in parts:
            part()
            if on_host is not None:
                on_host(self, host, done)

    def _process_on_host(self, host: Host, done: int) -> None:
        search, rows = self.search, self._present * self.key.per_input
        sequences = search.running_tokens[:rows, self._start : search.prompt_capacity + done]
        # Copies, as in the library's loop every step has tensors of its own: a processor may keep them.
        given = sequences.clone()
        self._scores[:rows] = host.process(given, self._scores[:rows].clone())
        if not torch.equal(sequences, given):  # somebody has written there, which counts in the library's loop, too
            sequences.copy_(given)

    def _keep_on_host(self, host: Host, done: int) -> None:
        rows = self._present * self.key.per_input
        host.keep({name: buffer[:rows].clone() for name, buffer in self._kept.items()})

    def _stop_on_host(self, host: Host, done: int) -> None:
        self._keep_on_host(host, done)
        search, end = self.search, self.search.prompt_capacity + done
        tokens = search.proposed(self._proposal, self._present, self._start, end)
        given = tokens.clone()
        stops = host.stops(given)
        self._stops[: stops.shape[0]] = stops
        if not torch.equal(tokens, given):
            search.running_tokens[: len(given), self._start : end] = given[:, :-1]
            self._last = given[:, -1]

    def _write_last(self, host: Host, done: int) -> None:
        """The token that a criterion has written: what it was decides whether the sequence ends."""
        if self._last is not None:
            rows, end = len(self._last), self.search.prompt_capacity + done
            self.search.running_tokens[:rows, end] = self.search.tokens.view(-1)[:rows] = self._last
            self._last = None

    def _capture(self, part: Callable[[], object]) -> graph.Graph | Program:
        if self._growing is not None:
            self._growing.lengths = self._lengths_in_positions()
        made = graph.new(self.device, self._growing)
        made.capture(part)
        return made

    def stored(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """K and V of self- and of cross-attention, layer by layer, [rows of the inputs, heads, positions, dim].

        Of self-attention those of the prompt, and of all tokens but the last. Waits for the device.
        """
        new = int(self.search.length.max()) - self.sizes.prompt - 1
        own, cross = self._lengths
        at_end = not self.key.source_in_front
        return (
            [kv.materialize(self._present, length, new, at_end) for kv, length in zip(self._own, own, strict=True)],
            [kv.materialize(self._present, length) for kv, length in zip(self._cross, cross, strict=True)],
        )

    def take_over(self, other: CapturedStep, inputs: Tensor | slice = slice(None)) -> None:
        """Goes on where `other` is, a step of the same key with less capacity, or where these of more inputs are."""
        rows = inputs if isinstance(inputs, slice) else beams.rows_of(inputs, other.key.per_input)
        self._start, self._present, self._lengths = other._start, other._present, other._lengths
        for kv, old in zip((*self._own, *self._cross), (*other._own, *other._cross), strict=True):
            kv.take_over(old, inputs, rows)
        self._state.take_over(other._state, rows)
        self._measure()
        for name, buffer in self._inputs.items():
            given = other._inputs[name][rows]
            buffer.zero_()
            buffer[:, : given.shape[1]] = given
            if self._grows(name):
                self._extend(buffer)
        self._most_new = max(self._most_new, other._most_new)
        self._move_bounds()
        self.search.take_over(other.search, inputs)
        if not self._proposal and other._proposal:
            self._make_proposal(other._proposal)
        self._flag.reset()

    # ---- what is captured

    def _advance(self) -> None:
        """The K/V of this step have been stored; the next one continues the rows that the search has chosen."""
        state, parents, taken = self._state, self.search.parents, self.search.taken.view(-1)
        positions = [buffer for name, buffer in self._inputs.items() if name in POSITIONS]
        masks = [buffer for name, buffer in self._inputs.items() if self._grows(name)]
        if search_step.available(taken) and search_step.serves(positions, masks):
            torch.ops.fastgen.advance_(
                parents, taken, self._stored, state.numbers, state.ancestry, self._seen, positions, masks
            )
        else:
            state.advance(parents, taken)
            self._measure()
            for buffer in positions:
                buffer.add_(taken.unsqueeze(1))
            for mask in masks:
                self._extend(mask)
        self._send()

    def _measure(self) -> None:
        """To the model the cache is as long as its longest row."""
        torch.amax(self._state.position, 0, out=self._seen)
        self._seen.add_(self._stored)

    def _send(self) -> None:
        self._flag.send(self.search.done)

    def _logits(self, model: Any) -> Tensor:
        """[rows, vocabulary] of the tokens that the search has chosen."""
        inputs = model.prepare_inputs_for_generation(
            self.search.tokens.unsqueeze(1),
            next_sequence_length=1,
            **releases.with_cache(self._cache_of_step(model)),
            **self._inputs,
            **self._constants(),
        )
        # What is captured is made of torch's own products, for which others stand later.
        products = contextlib.nullcontext() if _is_eager.get() else layer_forms.plain_linear()
        ranges = contextlib.nullcontext() if self._is_known(model) else Ranges()
        with ranges, fused(), products:
            self._logits_seen = model(**inputs, return_dict=True).logits[:, -1]
        return self._logits_seen

    def _is_known(self, model: Any) -> bool:
        """Whether the host may ask how long the cache is, in a step that nobody looks at."""
        return _is_eager.get() and self._eager_steps > 0 and counts_on_the_host(model)

    def _cache_of_step(self, model: Any) -> Any:
        """The KV cache as the model is told of it: an int of positions takes no time, as a `SymbolicLength` does."""
        if not self._is_known(model):
            return self._cache
        return cache_of(self._own, self._cross, int(self._seen))

    def _constants(self) -> dict[str, Any]:
        """The model's inputs that are in no buffers."""
        found: dict[str, Any] = dict(self.key.constants)
        if self.key.encoder is not None:
            kind_of_output, width = self.key.encoder
            states = self._nothing.expand(self.key.rows, self.sizes.source, width)
            found["encoder_outputs"] = kind_of_output(last_hidden_state=states)
        return found

    def _normalised(self, logits: Tensor) -> Tensor:
        """What processors get: of beam search log-probabilities, otherwise the logits, in float32."""
        if isinstance(self.search, BeamSearch):
            return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        return logits.float()

    def _processed(self, logits: Callable[[], Tensor]) -> Scores:
        """What the search chooses from, after the processors."""
        if self.processors is None:  # the host has run them
            self._keep("scores", self._scores)
            return self._scores, False
        found = logits()
        self._keep("logits", found)
        if not self.processors and "scores" not in self._kept:
            return found, True
        search = self.search
        scores = self._normalised(found)
        start, length, limit = (x.view(-1, 1) for x in (search.start, search.length, search.limit))
        tokens = StepTokens(search.running_tokens, start, length, search.prompt, limit - start)
        for processor in self.processors:
            scores = processor(scores, tokens)
        self._keep("scores", scores)
        return scores, False

    def _put_scores(self, logits: Callable[[], Tensor]) -> None:
        """What the host's processors get."""
        found = logits()
        self._keep("logits", found)
        self._scores.copy_(self._normalised(found))

    def _keep(self, name: str, made: Tensor) -> None:
        """For the host, if the call returns it."""
        if name in self._kept:
            self._kept[name].copy_(made)

    def _choose(self, scores: Callable[[], Scores], end: Callable[[], None]) -> None:
        self.search.choose(*scores())
        end()

    def _put_proposal(self, scores: Callable[[], Scores]) -> None:
        proposal = self.search.propose(*scores())
        if not self._proposal:  # for the first token, which is not captured
            self._make_proposal(proposal)
        for buffer, part in zip(self._proposal, proposal, strict=True):
            buffer.copy_(part)

    def _make_proposal(self, like: tuple[Tensor, ...]) -> None:
        self._proposal = tuple(torch.zeros_like(part) for part in like)
        self._stops = torch.zeros(like[0].numel(), dtype=torch.bool, device=self.device)

    def _take(self, end: Callable[[], None]) -> None:
        self.search.take(self._proposal, self._stops)
        end()
