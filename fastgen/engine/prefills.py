"""Plans the prefills of requests that enter slots: after known prefixes, and in chunks while others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.prompt_caches import BLOCK, PrefixCache, Sources
from fastgen.engine.planning import mean
from fastgen.engine.requests import Request
from fastgen.memory import free_host_memory
from fastgen.ops import fingerprint
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding
from fastgen.optimizer.transformers.entering import Entering

# Fewest tokens of a prefix that is worth a prefill of its own.
LEAST_SHARED = 4 * BLOCK
# Kept K and V may take this part of the free memory, or this many bytes if nothing may depend on the free memory.
SHARE_OF_MEMORY, PREFIX_BYTES = 0.05, 2**28
# Limit for kept encoder outputs, in bytes.
SOURCE_BYTES = 2**26
# Fewest tokens of a chunk: each forward pass reads all weights.
LEAST_CHUNK = 64
# The part of the allowed stall that a chunk takes, by the average time of a token. Late tokens of a long prompt take
# longer, because they attend to all before them, and there is overhead around the forward passes.
SHARE_OF_CHUNK = 0.4
# Requests that are prefilled together take this part of the allowed stall, if they are short enough. More of them would
# wait for each other's first tokens and gain little: a pass over that many tokens is compute-bound.
SHARE_OF_STALL = 0.25


class Prefills:
    """Plans prefills, and keeps prefixes and encoder outputs that requests share, as long as the model stays the same:
    the state given to `plan`, what recordings guard (hooks, settings, functions), and the contents of the weights.
    Reading the contents takes as long as a step, so it happens only if something kept is about to be used, once in a
    turn.

    Args:
        model: the model that is called.
        shares: prompts may share prefixes: K and V of a token do not depend on later tokens, nor on padding.
        has_encoder: keep encoder outputs.
        max_stall: seconds that requests in slots may wait for a prefill; None for no limit. Nothing then depends on a
            clock, or on the free memory.

    Attributes:
        chunks: forward passes of unfinished prefills after which requests in slots advanced.
    """

    def __init__(self, model: Any, shares: bool, has_encoder: bool, max_stall: float | None) -> None:
        self._model, self.max_stall, self.chunks = model, max_stall, 0
        most = PREFIX_BYTES if max_stall is None else int(SHARE_OF_MEMORY * free_host_memory())
        self.prefixes = PrefixCache(most) if shares and not has_encoder else None
        self.sources = Sources(min(most, SOURCE_BYTES), self._has_contents) if has_encoder else None
        self._state: Any = None  # of the model, when the kept tensors were made
        self._guarded: Hashable = None
        self._contents: list[int] | None = None  # None while nothing is kept
        self._has_looked = False  # at the contents, in this turn
        self._seconds: float | None = None  # seconds of a token

    @property
    def shared_positions(self) -> int:
        """Positions of prompts that earlier requests had prefilled."""
        return 0 if self.prefixes is None else self.prefixes.reused

    @property
    def shared_sources(self) -> int:
        """Sources that earlier requests had encoded."""
        return 0 if self.sources is None else self.sources.reused

    def forget(self) -> None:
        """Discards what is kept, because the model may have changed in a way that its state does not show."""
        self._state = None

    def begin_turn(self) -> None:
        """Begins a turn, before which weights may have been written to."""
        self._has_looked = False

    def _clear(self) -> None:
        for kept in (self.prefixes, self.sources):
            if kept is not None:
                kept.clear()

    def _has_contents(self) -> bool:
        """Whether the weights have the contents with which the kept tensors were made; clears these otherwise."""
        if not self._has_looked:
            self._has_looked, now = True, _contents(self._model)
            if now != self._contents:
                self._clear()
                self._contents = now
                return False
        return True

    def _is_guarded(self, model: Any) -> bool:
        """Whether anything may be kept of the model in its present state. Clears what was kept of another state."""
        try:
            guarded = graph_cache.state(model)
        except CannotBeCaptured:
            return False
        if guarded != self._guarded:
            self._clear()
            self._guarded = guarded
        return True

    def alone(self, first: Request, waiting: Sequence[Request]) -> bool:
        """Whether a request is better prefilled alone: its prefix is known, or other waiting requests share it."""
        tokens = self._tokens(first)
        if self.prefixes is None or not self._is_long(first):
            return False
        if self._knows(tokens, first.adapter):
            return True
        beginning = tokens[:LEAST_SHARED]
        return any(self._tokens(other)[:LEAST_SHARED] == beginning for other in waiting if other is not first)

    def fitting(self, batch: list[Request]) -> list[Request]:
        """Returns the requests of a batch, from the first one on, to prefill together: at least one."""
        most, longest = self._most(SHARE_OF_STALL), 0
        if most is None or self._seconds is None:
            return batch
        for count, request in enumerate(batch):
            longest = max(longest, request.length)
            if count and longest * (count + 1) > most:
                return batch[:count]
        return batch

    def _most(self, share: float) -> int | None:
        """Returns how many tokens a pass may have to take this part of the allowed stall, at least a chunk's minimum;
        None for no limit. Returns the minimum as long as the time of a token is unknown.
        """
        if self.max_stall is None:
            return None
        return LEAST_CHUNK if self._seconds is None else max(int(share * self.max_stall / self._seconds), LEAST_CHUNK)

    def plan(
        self,
        batch: Sequence[Request],
        state: Any,
        others_wait: bool,
        take: Callable[[EnteringDecoding], None],
        step: Callable[[], None],
    ) -> Entering:
        """Plans the prefill of a batch.

        Args:
            state: the model's state.
            others_wait: there are requests in slots.
            take: receives the call after its prefill.
            step: runs a decode step of the requests in slots.
        """
        if self._state != state:
            self._clear()
            self._state, self._contents, self._has_looked = state, None, False
        if self._contents is None and (self.sources is not None or any(map(self._is_long, batch))):
            self._has_contents()
        given, find, known = (self._tokens(batch[0]), batch[0].adapter), None, 0
        if self.prefixes is not None and len(batch) == 1 and self._knows(*given) and self._has_contents():
            find = partial(self.prefixes.take, *given)
            known = self.prefixes.match(*given)
        begin, chunks = time.perf_counter(), self.chunks

        def between() -> None:
            nonlocal begin
            self.chunks, before = self.chunks + 1, time.perf_counter()
            step()
            begin += time.perf_counter() - before

        def taken(decoding: EnteringDecoding) -> None:
            count = sum(request.length - known for request in batch)
            if count >= LEAST_CHUNK:  # fewer tokens do not predict the time of many
                self._seconds = mean(self._seconds, (time.perf_counter() - begin) / count)
            self._keep(batch, decoding)
            if self.chunks > chunks:  # entering takes as long as a chunk, and may capture a step
                step()
            take(decoding)

        chunk = self._most(SHARE_OF_CHUNK) if others_wait else None
        return Entering(taken, find, chunk, between, self.sources, self._is_guarded)

    def _keep(self, batch: Sequence[Request], decoding: EnteringDecoding) -> None:
        """Keeps the prefixes of prompts that have been prefilled."""
        if self.prefixes is None or not (any(map(self._is_long, batch)) and self._is_guarded(decoding.model)):
            return
        prompt = decoding.prompt
        if any(keys.shape[2] != prompt.cached for keys, _ in prompt.own):
            return  # a sliding window has dropped the first positions
        if prompt.states:
            return  # the states are those after the whole prompt
        for row, request in enumerate(batch):
            tokens, begin = self._tokens(request), prompt.cached - request.length
            if self._is_long(request):
                one = slice(row, row + 1)
                own = [(k[one, :, begin:], v[one, :, begin:]) for k, v in prompt.own]
                self.prefixes.put(tokens, own, request.adapter)

    def _is_long(self, request: Request) -> bool:
        """Whether the request's prefix is worth keeping."""
        return len(self._tokens(request)) > LEAST_SHARED

    def _knows(self, tokens: list[int], adapter: str | None) -> bool:
        return self.prefixes is not None and self.prefixes.match(tokens, adapter) >= LEAST_SHARED

    def _tokens(self, request: Request) -> list[int]:
        """Returns the tokens of a prompt without padding, if K and V depend on nothing else; otherwise []."""
        if request.tokens is None or request.has_other_inputs or not (request.mask is None or bool(request.mask.all())):
            return []
        return request.token_list


def _contents(model: Any) -> list[int]:
    """Returns fingerprints of the contents of a model's weights and buffers."""
    if not fingerprint.is_available():
        return []
    held = chain(model.parameters(), model.buffers())
    plain = (each for each in held if type(each) in (Tensor, Parameter) and each.device.type == "cpu")
    return [fingerprint.fingerprint(each.detach().contiguous()) for each in plain if each.layout == torch.strided]
